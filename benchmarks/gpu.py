"""Time of inference and its gradient on a GPU, beside eager PyTorch, torch.compile, CPU cores and the traffic bound.

    PYTHONPATH=src python benchmarks/gpu.py --out results/benchmarks/gpu

Needs torch, NumPy and Triton; pytorch-crf and the compiled extension are measured where they are installed. Times are
milliseconds, the best of several calls, in float32, those of images per image. "sweeps" and "backward" are the engine
alone; "call" is all of `infer`, "call_with_gradient" includes the gradient. The traffic bound is the bytes that the
sweeps must move, divided by the bandwidth of a copy measured in the same run.
"""

import argparse
import platform
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

import riskfield as rf
from riskfield.kernels import EVERY_SWEEP, MessagePassingProblem, native_available
from timing import keep

SWEEPS = 20


def clock(work, repeats=5, warm=3):
    """Milliseconds of the fastest call."""
    for _ in range(warm):  # compiles, captures, replays
        work()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - began))
    return best


def copy_bandwidth():
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * clock(lambda: target.copy_(source)))


def bytes_moved(graph, batch, sweeps):
    """Bytes of all sweeps: of a message its table, the other's belief and message, itself; of a belief it and theta.

    Of the table of a pair, row 0 and column 0 are not read; where all variables are binary, a belief or message is one
    number: both as in `riskfield.kernels.gpu.canonical`.
    """
    binary = bool((graph.num_states == 2).all())
    size = graph.num_variables if binary else graph.node_size
    numbers = 2 * size
    for group in graph.factor_groups:
        for slot in range(2):
            own, other = (1, 1) if binary else (group.shape[slot], group.shape[1 - slot])
            table = (group.shape[0] - 1) * (group.shape[1] - 1)
            numbers += group.num_factors * (table + 2 * other + own)
    return 4 * sweeps * batch * numbers


def engine_times(graph, batch, schedule, sweeps, entropy, calls=True):
    """Sweeps and backward pass of the engine alone, and whole calls."""
    theta, grad = (torch.randn(batch, size, device="cuda") for size in (graph.theta_size, graph.mu_size))
    problem = MessagePassingProblem(graph, entropy.counting(graph), schedule, 0.0, False)
    times = _alone(problem, theta, grad, sweeps)
    if not calls:
        return times
    algorithm, stop = rf.MessagePassing(entropy, schedule), rf.Stop(sweeps, tol=None)
    times["call"] = clock(lambda: rf.infer(graph, theta, algorithm, stop=stop).mu) / batch
    leaf = theta.clone().requires_grad_()

    def gradient():
        mu = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=rf.Unroll()).mu
        torch.autograd.grad(mu, leaf, grad)

    times["call_with_gradient"] = clock(gradient) / batch
    return times


def _alone(problem, theta, grad, sweeps):
    from riskfield.kernels.gpu.run import MessagePassingRun

    began = time.perf_counter()
    run = MessagePassingRun(problem, theta, None)
    run.advance(sweeps, -1.0)
    torch.cuda.synchronize()
    times = {"first_call_s": time.perf_counter() - began}
    times["sweeps"] = clock(lambda: run.advance(sweeps, -1.0)) / len(theta)
    recorded = MessagePassingRun(problem, theta, None, record=EVERY_SWEEP)
    recorded.advance(sweeps, -1.0)
    times["backward"] = clock(lambda: recorded.backward(grad)) / len(theta)
    return times


def flooding(nodes, right, down, east, west, south, north):
    """One sweep in plain PyTorch on a grid: nodes (batch, row, column, state), tables with one more axis of states."""
    pad = torch.nn.functional.pad
    # TRW with rho = 1/2: tables are scaled by 2, and messages count half.
    received = pad(east, (0, 0, 1, 0)) + pad(west, (0, 0, 0, 1))
    received = received + pad(south, (0, 0, 0, 0, 1, 0)) + pad(north, (0, 0, 0, 0, 0, 1))
    belief = nodes + 0.5 * received
    new = (
        torch.logsumexp(2 * right + (belief[:, :, :-1] - west).unsqueeze(-1), -2),
        torch.logsumexp(2 * right + (belief[:, :, 1:] - east).unsqueeze(-2), -1),
        torch.logsumexp(2 * down + (belief[:, :-1] - north).unsqueeze(-1), -2),
        torch.logsumexp(2 * down + (belief[:, 1:] - south).unsqueeze(-2), -1),
    )
    return tuple(m - torch.logsumexp(m, -1, keepdim=True) for m in new)


def torch_times(rows, columns, states, batch):
    """Eager flooding, and torch.compile of a sweep of it."""
    nodes = torch.randn(batch, rows, columns, states, device="cuda")
    right = torch.randn(batch, rows, columns - 1, states, states, device="cuda")
    down = torch.randn(batch, rows - 1, columns, states, states, device="cuda")

    def run(sweep):
        messages = [torch.zeros_like(tables[..., 0]) for tables in (right, right, down, down)]
        for _ in range(SWEEPS):
            messages = sweep(nodes, right, down, *messages)
        return messages

    def with_gradient(sweep):
        leaves = [tensor.requires_grad_() for tensor in (nodes, right, down)]
        messages = run(sweep)
        torch.autograd.grad(messages, leaves, [torch.ones_like(message) for message in messages])
        for leaf in leaves:
            leaf.requires_grad_(False)

    times = {"eager": clock(lambda: run(flooding), 3, 1) / batch}
    if batch > 32:  # compiling once more takes long and tells little
        return times
    try:
        torch.compiler.reset()  # or it gives up compiling after a few shapes, and what follows is eager
        compiled = torch.compile(flooding, dynamic=False)
        times["compiled"] = clock(lambda: run(compiled), 3, 1) / batch
        torch.compiler.reset()
        times["compiled_with_gradient"] = clock(lambda: with_gradient(compiled), 3, 1) / batch
    except Exception as error:  # no compiler for the host, for example
        print(f"  torch.compile failed: {type(error).__name__}")
    return times


def cpu_time(graph, schedule, sweeps, entropy):
    """One image on one core of our own engine, in float32; its best schedule is the numbering."""
    if not native_available():
        return {}
    rf.set_num_threads(1)
    theta = torch.randn(graph.theta_size)
    algorithm, stop = rf.MessagePassing(entropy, schedule), rf.Stop(sweeps, tol=None)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        rf.infer(graph, theta, algorithm, stop=stop)
        best = min(best, 1e3 * (time.perf_counter() - began))
    return {"one_core": best}


def grids(shape, states, batches, bandwidth, compare=True):
    graph, entropy = rf.grid(*shape, states), rf.TRW(0.5)
    core = cpu_time(graph, rf.Sequential(), SWEEPS, entropy) if compare else {}
    for batch in batches:
        name = f"{shape[0]}x{shape[1]}, {states} states, {batch} images"
        times = engine_times(graph, batch, rf.Coloured(), SWEEPS, entropy, calls=compare) | core
        times["sweeps_and_backward"] = times["sweeps"] + times["backward"]
        if compare:
            times |= torch_times(*shape, states, batch)
        times["bound"] = 1e3 * bytes_moved(graph, batch, SWEEPS) / bandwidth / batch
        yield name, times
        torch.cuda.empty_cache()


def chains(count, length, states):
    """The log-likelihood of many sequences and its gradient, in all parameters and in the emissions."""
    emissions = torch.randn(count, length, states, device="cuda", requires_grad=True)
    tags = torch.randint(states, (count, length), device="cuda")

    def gradient(crf):
        return lambda: torch.autograd.grad(crf(emissions, tags), [emissions, *crf.parameters()])

    times = {"likelihood_gradient": clock(gradient(rf.nn.LinearChainCRF(states, batch_first=True).cuda()))}
    if find_spec("torchcrf"):
        from torchcrf import CRF

        times["pytorch_crf"] = clock(gradient(CRF(states, batch_first=True).cuda()), 3, 1)
    return f"{count} chains of {length}, {states} states", times


def fit_seconds(images, device, chunk, iterations):
    """Seconds per iteration of L-BFGS with the clique logistic loss through 10 sweeps of TRW.

    Images have random features, as many as those of `ImageFeatures`: 100 of pixels, 21 of edges for each direction, and
    414 x 526 pixels, as large as the mean of the Weizmann horses.
    """
    rows, columns = 414, 526
    graph = rf.grid(rows, columns, 2)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device=device, generator=generator)

    inputs = {"nodes": draw(images, rows * columns, 100), "factors": draw(images, graph.num_factors, 42)}
    labels = (inputs["nodes"][..., :3].sum(-1) + draw(images, rows * columns) > 0).long()
    schedule = rf.kernels.default_schedule(device)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5), schedule), rf.Stop(10, tol=None))
    found = rf.fit(
        rf.LinearModel(2, 100, 42, dtype=torch.float32).to(device),
        rf.Examples(graph, labels, inputs),
        rf.losses.CliqueLogistic(),
        inference,
        optimiser=rf.optim.LBFGS(iterations=iterations),
        ridge=1e-3,
        chunk_size=chunk,
    )
    first, last = found.history[0], found.history[-1]
    return (last.seconds - first.seconds) / (last.evaluations - first.evaluations)


def fit(images):
    """An evaluation of the objective and its gradient, of which an iteration of L-BFGS needs about one."""
    times = {"gpu_ms": 1e3 * fit_seconds(images, "cuda", 25, 6)}
    torch.cuda.empty_cache()
    if native_available():
        rf.set_num_threads(2)
        torch.set_num_threads(2)
        few = 5  # images; time grows with their number
        times["two_cores_ms"] = 1e3 * fit_seconds(few, "cpu", 1, 3) * images / few
    return f"fit, {images} images 414x526, 10 sweeps", times


def show(name, times):
    print(name)
    for key, value in times.items():
        print(f"  {key:36s}{value:10.4f}")
    ratios = [("sweeps", key) for key in ("bound", "eager", "compiled", "one_core")]
    ratios += [
        ("compiled_with_gradient", "sweeps_and_backward"),
        ("backward", "bound"),
        ("pytorch_crf", "likelihood_gradient"),
        ("two_cores_ms", "gpu_ms"),
    ]
    for a, b in ratios:
        if a in times and b in times:
            print(f"  {a + ' / ' + b:36s}{times[a] / times[b]:10.3f}")
    print(end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR/NAME", help="write all numbers to DIR/records.jsonl")
    parser.add_argument("--large", type=int, default=3163, help="rows and columns of the large graph; 0 leaves it out")
    parser.add_argument("--images", type=int, default=200, help="images of the fit; 0 leaves it out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    warnings.simplefilter("ignore", rf.errors.PerformanceWarning)
    began, bandwidth = time.perf_counter(), copy_bandwidth()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "host": platform.processor()}
    print(f"{machine['device']}, torch {machine['torch']}: copies move {bandwidth / 1e12:.2f} TB/s")
    results = {}

    def report(found):
        for name, times in found:
            show(name, times)
            results[name] = times
            if options.out:
                keep(options.out, {"machine": machine, "bandwidth": bandwidth, "ms": results})

    report(grids((200, 300), 2, (1, 32, 256), bandwidth))
    report(grids((240, 320), 8, (1, 8), bandwidth))
    report([chains(512, 128, 45)])
    if options.images:
        report([fit(options.images)])
    if options.large:
        report(grids((options.large, options.large), 2, (1,), bandwidth, compare=False))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
