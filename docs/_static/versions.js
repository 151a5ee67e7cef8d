// The list of versions in the sidebar. A hosted site has one folder per version beside a file versions.json, a list of
// their names, newest first (docs/add_version.py writes both). Pages opened as files, or hosted alone, show no list.
document.addEventListener("DOMContentLoaded", async () => {
  const box = document.querySelector(".versions");
  if (!box || !location.protocol.startsWith("http")) return;
  const root = new URL("../", new URL(document.documentElement.dataset.content_root, location.href));
  const reply = await fetch(new URL("versions.json", root)).catch(() => null);
  if (!reply || !reply.ok) return;
  const list = box.querySelector("select");
  for (const version of await reply.json()) list.add(new Option(version, version, false, version === list.dataset.version));
  list.addEventListener("change", async () => {
    const folder = new URL(`${list.value}/`, root);
    const page = new URL(list.dataset.page, folder);
    const there = await fetch(page, { method: "HEAD" }).catch(() => null);  // an older version may lack the page
    location.href = there && there.ok ? page : folder;
  });
  box.hidden = false;
});
