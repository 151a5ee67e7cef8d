const root = document.documentElement;
for (const slider of document.querySelectorAll("input[data-sets]"))
  slider.addEventListener("input", () => root.style.setProperty(slider.dataset.sets, slider.value));

// A click on an image shows it in a dialog, where buttons and the wheel change its size.
const dialog = document.querySelector("dialog.zoom"), view = dialog.querySelector(".zoom-view");
let scale = 1;
function zoom(factor) {
  scale = Math.min(16, Math.max(1, scale * factor));
  if (view.firstChild) view.firstChild.style.width = `${100 * scale}%`;
}
function enlarge(stack) {
  const copy = stack.cloneNode(true), image = stack.closest(".image");
  copy.removeAttribute("role");
  view.style.setProperty("--photo", image.style.getPropertyValue("--photo"));
  view.replaceChildren(copy);
  dialog.querySelector(".zoom-title").textContent =
    `${stack.nextElementSibling.textContent} · ${image.querySelector("h3").firstChild.textContent.trim()}`;
  scale = 1;
  zoom(1);
  dialog.showModal();
}
for (const stack of document.querySelectorAll(".image .stack")) {
  stack.addEventListener("click", () => enlarge(stack));
  stack.addEventListener("keydown", event => { if (event.key === "Enter") enlarge(stack); });
}
for (const button of dialog.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
view.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2); });
dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
