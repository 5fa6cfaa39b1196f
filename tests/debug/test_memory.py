"""memory: every byte has one category, the right one, at every moment; and watching changes nothing."""

import gc
import json
import weakref

import pytest
import torch
from harness import DEVICES, Compiled, make_net
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import debug

F32 = 4  # bytes


class Mlp(nn.Module):
    """Sizes from which every byte can be counted by hand."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.register_buffer("gain", torch.ones(3))

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


PARAMETERS, GAIN, INPUT = F32 * (8 * 16 + 16 * 4), F32 * 3, F32 * 32 * 8


def parts(make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)):
    torch.manual_seed(0)
    model = Mlp()
    return model, make_optimizer(model.parameters()), torch.randn(32, 8)


def make_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def at(profile, name, step=0):
    """Return bytes by category before the first event of a phase of a step."""
    begins = next(i for i, mark in enumerate(profile.marks) if mark.name == f"step {step}")
    mark = next(mark for mark in profile.marks[begins:] if mark.name == name)
    return {category: values[mark.at - 1] for category, values in profile.series.items()}


def profiler_peak(fn):
    """Return the most bytes that a CPU function has alive at once, by torch's profiler: it asks the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        fn()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def test_counted_by_hand():
    """P1: each category is what the shapes say, where forward, backward and optimizer begin."""
    model, optimizer, x = parts()
    profile = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer, steps=2)
    nothing = dict.fromkeys(debug.CATEGORIES, 0)
    start = {**nothing, "parameter": PARAMETERS + GAIN, "input": INPUT}
    assert {name: values[0] for name, values in profile.series.items()} == start
    # Kept for backward: what relu returned (the second layer saves the same), what the second layer returned (square
    # saves it), and the loss, which somebody holds.
    kept = F32 * (32 * 16 + 32 * 4 + 1) + F32  # and the gradient of the loss, ones_like(loss), made before backward
    assert at(profile, "backward") == {**start, "activation": kept}
    assert at(profile, "optimizer")["gradient"] == PARAMETERS
    state = {**start, "optimizer state": PARAMETERS}
    assert at(profile, "backward", step=1) == {**state, "activation": kept}
    assert {name: values[-1] for name, values in profile.series.items()} == {**state, "gradient": PARAMETERS}
    assert not profile.forecast
    assert profile.device == "cpu"


def test_is_what_the_allocator_gave():
    """P1: the peak is that of the profiler, which watches the allocator and no tensors."""
    model, optimizer, x = parts(torch.optim.Adam)
    profile = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer)
    model, optimizer, x = parts(torch.optim.Adam)
    measured = profiler_peak(lambda: make_step(model, optimizer)(x)) + PARAMETERS + GAIN + INPUT
    print(f"recorded {profile.peak} bytes, profiler {measured}, {profile.peak / measured - 1:+.3%}")
    assert abs(profile.peak - measured) <= 64  # numbers that kernels keep for themselves while they run


def test_series_add_up():
    """P1: as many levels as times, in order, never negative, and the peak is the largest sum."""
    model, optimizer, x = parts()
    profile = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer)
    assert {len(values) for values in profile.series.values()} == {len(profile.times_ms)}
    assert list(profile.times_ms) == sorted(profile.times_ms)
    assert min(map(min, profile.series.values())) == 0
    assert profile.peak == max(map(sum, zip(*profile.series.values(), strict=True))) == sum(profile.at_peak.values())
    alive = sum(values[-1] for values in profile.series.values())
    assert alive == INPUT + GAIN + 3 * PARAMETERS, "all that remains is what is still there"
    assert sum(holder.bytes for holder in profile.holders) == profile.peak


def test_context_over_a_loop():
    """P1: a loop of the user's: steps, phases and categories are those of the function called as often."""
    model, optimizer, x = parts()
    step = make_step(model, optimizer)
    with debug.memory(model, optimizer, inputs=x) as recorded:
        for _ in range(2):
            step(x)
    names = [mark.name for mark in recorded.profile.marks]
    assert names == ["step 0", "forward", "backward", "optimizer", "step 1", "forward", "backward", "optimizer"]
    model, optimizer, x = parts()
    called = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer, steps=2)
    assert recorded.profile.at_peak == called.at_peak
    assert [mark.name for mark in called.marks] == names


def test_phases_of_clipping_and_accumulation():
    """P1: micro-batches are one step, clipping belongs to the optimizer, gradients that are added to stay gradients."""
    model, optimizer, x = parts()
    with debug.memory(model, optimizer) as recorded:
        for _ in range(2):
            for half in x.chunk(2):
                model(half).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    profile = recorded.profile
    window = ["forward", "backward", "forward", "backward", "optimizer"]
    assert [mark.name for mark in profile.marks] == ["step 0", *window, "step 1", *window]
    assert at(profile, "optimizer")["gradient"] == at(profile, "optimizer", step=1)["gradient"] == PARAMETERS
    assert profile.at_peak["input"] == INPUT, "what was there and nobody's is an input"


def test_temporary_and_autograd_detail():
    """P1: what dies within forward was temporary, what backward makes and frees is autograd's."""
    w = torch.ones(1024, requires_grad=True)

    def step():
        (w.exp() + w.cos()).sum().backward()  # exp saves its result, cos its argument, the sums nothing

    profile = debug.memory(step)
    size = F32 * 1024
    peak = {name: max(values) for name, values in profile.series.items()}
    assert peak["temporary"] == 2 * size, "the cosine and the sum of both"
    assert at(profile, "backward")["activation"] == size + 2 * F32
    assert peak["gradient"] == size
    assert peak["autograd detail"] >= size
    assert peak["input"] == size, "a leaf of no model was there before"


def test_without_backward_nothing_is_an_activation():
    """P1: an evaluation."""
    model, _, x = parts()
    with torch.no_grad():
        profile = debug.memory(model, x)
    assert max(profile.series["activation"]) == 0
    assert max(profile.series["temporary"]) == F32 * 2 * 32 * 16, "what two layers return, one after the other"
    assert profile.series["parameter"][0] == PARAMETERS + GAIN, "a model that is called is the model"


def test_activations_of_a_forward_that_fails():
    """M2, P1: where forward runs out of memory, what it made until then is what a backward would have found."""
    model, optimizer, x = parts()

    def forward():
        loss = model(x).square().mean()
        return loss + torch.empty(2**50).sum()

    recorded = debug.memory(model, optimizer, inputs=x)
    with pytest.raises(RuntimeError, match="allocate memory"), recorded:
        forward()
    assert (
        recorded.profile.series["activation"][-1] == F32 * 32 * (16 + 4) + F32
    )  # what ReLU and square saved, the loss
    assert recorded.profile.phase_at_peak == "step 0, forward"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    """P1: checkpointing keeps less from forward, and what it makes again is an activation again."""
    model = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def step(x, checkpointed):
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        x.sum().backward()

    x = torch.randn(64, 32, requires_grad=True)
    plain, saving = (debug.memory(step, x, flag, model=model) for flag in (False, True))
    size, small = F32 * 64 * 32, 256
    assert abs(at(plain, "backward")["activation"] - 8 * size) <= small, "what each tanh returned"
    assert abs(at(saving, "backward")["activation"] - 4 * size) <= small, "what each block returned"
    begins = next(mark.at for mark in saving.marks if mark.name == "backward")
    assert max(saving.series["activation"][begins:]) >= 5 * size, "and one block's inside, made again"
    leaves = 2 * size if reentrant else 0  # it cuts the graph: inside, the input of a block is a leaf with a gradient
    assert max(saving.series["gradient"]) == max(plain.series["gradient"]) + leaves


def test_holders_have_module_and_line():
    """P1: who made it, by path, and with the user's line; in backward that of the forward."""
    model, optimizer, x = parts()

    def step():
        loss = model(x).square().mean()  # the line
        loss.backward()
        optimizer.step()  # the optimizer's

    profile = debug.memory(step, model=model, optimizer=optimizer)
    activation = next(holder for holder in profile.holders if holder.category == "activation")
    assert (activation.module, activation.shape, activation.dtype) == ("", (32, 16), "float32")
    assert "test_memory.py" in activation.line
    evaluation = debug.memory(model, x)
    assert ("a", (32, 16)) in {(holder.module, holder.shape) for holder in evaluation.holders}
    assert "return self.b(F.relu(self.a(x)))" in activation.line
    assert activation.bytes == F32 * 32 * 16
    assert list(profile.holders) == sorted(profile.holders, key=lambda holder: -holder.bytes)
    model.zero_grad()
    gradients = debug.memory(step, model=model, optimizer=optimizer).holders
    gradient = next(holder for holder in gradients if holder.category == "gradient")
    assert gradient.module == "b", "backward is there first"
    assert "return self.b(F.relu(self.a(x)))" in gradient.line
    state = next(holder for holder in gradients if holder.category == "optimizer state")
    assert (state.module, state.line) in (("a", ""), ("b", "")), "made before"
    model, optimizer, x = parts()
    with debug.memory(model, optimizer) as recorded:
        step()
        model(torch.zeros(4096, 8))  # the largest at its peak, and all else is alive then
    made = next(holder for holder in recorded.profile.holders if holder.category == "optimizer state")
    assert "# the optimizer's" in made.line


def test_line_in_a_function_without_hooks():
    """P1: an autograd.Function's own backward, and an operation whose line is in the loss."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad.repeat(2)[: grad.numel()].clone()

    x = torch.ones(1 << 12, requires_grad=True)
    profile = debug.memory(lambda: Double.apply(x).sum().backward())  # here
    made = [holder for holder in profile.holders if holder.category == "autograd detail"]
    assert made
    assert all("test_memory.py" in holder.line for holder in made)


def test_copies_from_another_device_are_inputs():
    """P1: a batch that the loop itself brings to the device."""
    model = Mlp().to("meta")
    with debug.memory(model) as recorded:
        batch = torch.randn(32, 8).to("meta")
        model(batch).sum().backward()
    assert recorded.profile.device == "meta"
    assert max(recorded.profile.series["input"]) == INPUT


def test_storage_that_is_resized():
    """P1: memory that a tensor gives back or takes without an end."""
    x = torch.zeros(256)

    def step():
        y = torch.empty(0)
        y.resize_(1024)
        y.untyped_storage().resize_(0)
        y.detach()  # an operation, from which it is seen
        return x.sum()

    profile = debug.memory(step, inputs=x)
    assert max(profile.totals) == F32 * (256 + 1024)
    assert profile.totals[-1] == F32 * 256


def test_shared_and_viewed_memory_counts_once():
    """P1: tied weights, views, slices."""
    model = Mlp()
    model.c = nn.Linear(8, 16, bias=False)
    model.c.weight = model.a.weight
    x = torch.randn(64, 8)[::2]
    with torch.no_grad():
        profile = debug.memory(lambda: (model.a(x).view(-1)[1:], x.t()), model=model, inputs=(x, x[1:]))
    assert profile.series["parameter"][0] == PARAMETERS + GAIN
    assert profile.series["input"][0] == 2 * INPUT, "the whole storage"
    assert max(profile.series["temporary"]) == F32 * 32 * 16


def test_changes_nothing():
    """P1: losses, parameters and state are the bits of an unwatched run, and all hooks are gone."""
    results = []
    for watched in (False, True):
        model = make_net("cpu", dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        step = make_step(model, optimizer)
        torch.manual_seed(7)
        if watched:
            debug.memory(step, x, model=model, optimizer=optimizer, steps=3)
        else:
            for _ in range(3):
                step(x)
        state = [tensor for values in optimizer.state.values() for tensor in values.values()]
        results.append([*model.state_dict().values(), *state])
        modules = [*model.modules()]
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_keeps_nothing_alive():
    """P1: neither tensors nor the model, in the context and after it."""
    model, optimizer, x = parts()
    with debug.memory(model, optimizer) as recorded:
        y = model(x)
        loss = y.sum()
        ends = [weakref.ref(y), weakref.ref(loss)]
        loss.backward()
        del y, loss
        assert [end() for end in ends] == [None, None]
    del recorded, optimizer
    end = weakref.ref(model)
    del model
    gc.collect()
    assert end() is None


def test_error_inside():
    """P1: an error of the user's comes through as it is, and what was seen up to there can be read."""
    model, optimizer, x = parts()
    recorded = debug.memory(model, optimizer)

    def divide():
        with recorded:
            return model(x) / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        divide()
    assert recorded.profile.peak >= PARAMETERS + INPUT
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        debug.memory(model, torch.ones(2, 3))
    assert not any(module._forward_hooks for module in model.modules())


def test_wrong_use():
    model, optimizer, x = parts()
    with pytest.raises(ValueError, match=r"memory\(steps=0\)"):
        debug.memory(make_step(model, optimizer), x, steps=0)
    with pytest.raises(ValueError, match=r"memory\(steps=5\).*with debug.memory\(model, optimizer\) as recorded"):
        debug.memory(model, steps=5)
    with pytest.raises(ValueError, match=r"memory\(steps=1\)"):
        debug.memory(model, optimizer, steps=1)
    with pytest.raises(ValueError, match=r"memory\(None, Tensor, y=\): there is no function to call.*train_step"):
        debug.memory(None, optimizer, x, y=x)
    with pytest.raises(ValueError, match=r"memory\(optimizer=\(SGD, int\)\): expected an optimizer, or a list"):
        debug.memory(model, optimizer=[optimizer, 3])
    lazy = nn.Sequential(model, nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"debug.memory: model\.1\.weight has no shape yet.*Call the model once with"):
        debug.memory(lazy, x)
    recorded = debug.memory(model, optimizer)
    with pytest.raises(ValueError, match="no profile before"):
        _ = recorded.profile
    with recorded:
        pass
    with pytest.raises(ValueError, match="entered before"), recorded:
        pass


def test_table_and_json():
    """P1: the table has MiB and share, the peak's place, and the largest; JSON holds all of it."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    profile = debug.memory(
        make_step(model, optimizer), torch.zeros(1024, 512), model=model, optimizer=optimizer, steps=2, label="big"
    )
    text = str(profile)
    assert "big on cpu: peak" in text.splitlines()[0]
    assert text.splitlines()[0].endswith("in step 1, backward")
    row = next(line for line in text.splitlines() if line.startswith("parameter"))
    assert row.split() == ["parameter", "1.0", f"{2**20 / profile.peak:.1%}"]
    assert f"{profile.peak / 2**20:.1f}" in next(line for line in text.splitlines() if line.startswith("in all"))
    assert "optimizer state" in text
    assert "test_memory.py" in text
    again = debug.MemoryProfile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again == profile
    assert json.loads(json.dumps(profile.to_dict()))["at_peak"] == profile.at_peak
    assert "graph pool" not in text, "a row without bytes is left out"


def test_two_policies_side_by_side():
    """P1: what a policy saves, by category."""
    profiles = []
    for policy in ("float32", "bf16-true"):
        model = ampkit.Policy.parse("bf16-true" if policy == "bf16-true" else "32-true").apply(nn.Linear(512, 512))
        dtype = next(model.parameters()).dtype
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.zeros(64, 512, dtype=dtype)
        profiles.append(debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer, label=policy))
    lines = profiles[1].beside(profiles[0]).splitlines()
    assert lines[0].split()[-4:] == ["bf16-true", "float32", "difference", "ratio"]
    assert next(line for line in lines if line.startswith("parameter")).split() == [
        "parameter", "0.5", "1.0", "-0.5", "0.50",
    ]  # fmt: skip


def test_graphed_step_is_watched_too():
    """P1: an emulated graph shows what an eager step shows: same categories after it."""
    model = make_net("cpu", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    x = torch.randn(4, 3, 8, 8)
    with ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate") as step:
        profile = debug.memory(step, x, model=model, optimizer=optimizer, steps=6)
        assert step.replays == 3
    size = sum(F32 * param.numel() for param in model.parameters())
    assert profile.series["optimizer state"][-1] == size
    assert profile.series["gradient"][-1] in (0, size)
    assert at(profile, "backward", step=5)["activation"] > 0


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_runs_on_behind_it(warm):
    """P1: compiled parts are recorded as eager code, and are compiled ones again afterwards, as often as without."""
    model, optimizer, x = parts()
    compiled = Compiled(model)
    step = make_step(compiled.module, optimizer)
    if warm:
        step(x)
    before = compiled.calls
    profile = debug.memory(step, x, model=model, optimizer=optimizer, steps=2)
    assert compiled.calls == before
    model, optimizer, x = parts()
    eager = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer, steps=2)
    assert profile.at_peak == eager.at_peak
    for _ in range(3):
        step(x)
    assert (compiled.calls, compiled.compiles) == (before + 3, 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_closure(by_name):
    """P1: what a closure of `optimizer.step` does is forward and backward as elsewhere."""
    profiles = []
    for closes in (False, True):
        model, optimizer, x = parts()

        def closure(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def step(closes=closes, closure=closure, optimizer=optimizer):
            if not closes:
                closure()
                optimizer.step()
            elif by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)

        with debug.memory(model, optimizer, inputs=x) as recorded:
            for _ in range(2):
                step()
        profiles.append(recorded.profile)
    plain, closing = profiles
    window = ["forward", "backward", "optimizer"]
    assert [mark.name for mark in closing.marks] == ["step 0", *window, "step 1", *window]
    assert closing.at_peak["activation"] == plain.at_peak["activation"] > 0
    kept = F32 * (32 * 16 + 32 * 4 + 1)  # as in test_counted_by_hand; who calls holds no loss
    for number in range(2):
        assert at(closing, "backward", number) == at(plain, "backward", number)
        assert at(closing, "backward", number)["activation"] >= kept
        assert at(closing, "optimizer", number)["gradient"] == PARAMETERS
    assert closing.series["optimizer state"][-1] == PARAMETERS


def test_closure_that_is_called_more_than_once():
    """P1: a step that calls its closure again is one step still, also where it changes parameters before."""
    model, _, x = parts()

    def closure():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    searching = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
    profile = debug.memory(searching.step, closure, model=model, optimizer=searching, inputs=x)
    window = ["forward", "backward", "optimizer"]
    assert [mark.name for mark in profile.marks] == ["step 0", *window, *window]

    class Ascending(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad * 0.1)
            with torch.enable_grad():
                return closure()

    model.zero_grad()
    ascending = Ascending(model.parameters(), lr=0.1)
    with debug.memory(model, ascending, inputs=x) as recorded:
        for _ in range(2):
            closure()
            ascending.step(closure)
    assert [mark.name for mark in recorded.profile.marks] == ["step 0", *window, *window, "step 1", *window, *window]


def test_closure_that_fails():
    """P1: behind a closure that raised, the optimizer does not step any more."""
    model, optimizer, x = parts()
    with debug.memory(model, optimizer, inputs=x) as recorded:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 // 0)
        make_step(model, optimizer)(x)
    assert [mark.name for mark in recorded.profile.marks] == ["step 0", "forward", "backward", "optimizer"]


def test_several_optimizers():
    """P1: the state of each is optimizer state, however they are passed."""
    for call in ("positions", "list", "both"):
        model, _, x = parts()
        made = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.a, model.b)]

        def step(model=model, made=made, x=x):
            model(x).square().mean().backward()
            for optimizer in made:
                optimizer.step()

        if call == "list":
            profile = debug.memory(step, model=model, optimizer=made, inputs=x)
        else:
            split = len(made) if call == "positions" else 1
            with debug.memory(model, *made[:split], optimizer=made[split:], inputs=x) as recorded:
                step()
            profile = recorded.profile
        assert profile.series["optimizer state"][-1] == PARAMETERS
        assert [mark.name for mark in profile.marks] == ["step 0", "forward", "backward", "optimizer"]
        assert not any(optimizer._optimizer_step_pre_hooks for optimizer in made)


def test_many_steps_do_not_grow():
    """P1: a profile of a loop that leaks nothing ends each step where the one before ended."""
    model, optimizer, x = parts()
    profile = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer, steps=5)
    starts = [profile.totals[mark.at - 1] for mark in profile.marks if mark.name.startswith("step ")]
    assert len(set(starts[1:])) == 1
    assert len({profile.totals[mark.at - 1] for mark in profile.marks if mark.name == "backward"}) == 2


def forget_others() -> None:
    """Free what other tests have left. A block that several streams used is freed at an allocation after its events."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.cuda
def test_adds_up_to_what_cuda_says():
    """P1: at the end of each step the sum is torch.cuda.memory_allocated, workspaces of libraries included."""
    forget_others()
    before = torch.cuda.memory_allocated()
    model = make_net("cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x = torch.randn(64, 3, 8, 8, device="cuda")
    step, levels = make_step(model, optimizer), []

    def watched(x):
        step(x)
        levels.append(torch.cuda.memory_allocated() - before)

    profile = debug.memory(watched, x, model=model, optimizer=optimizer, steps=3)
    ends = [mark.at - 1 for mark in profile.marks if mark.name.startswith("step ")][1:]
    pools = profile.series["graph pool"]  # of graphs that another test has left, which were there before
    assert [profile.totals[i] - pools[i] for i in [*ends, -1]] == levels
    assert profile.device == f"cuda:{torch.cuda.current_device()}"


@pytest.mark.cuda
def test_peak_is_cudas():
    """P1: the recorded peak is torch.cuda.max_memory_allocated of the same step unwatched, within 2 %."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4096, 1024, device="cuda")
    step = make_step(model, optimizer)
    for _ in range(2):
        step(x)
    forget_others()
    others = torch.cuda.memory_allocated() - sum(
        tensor.untyped_storage().nbytes()
        for tensor in [x, *model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    )
    optimizer.zero_grad()
    others -= sum(F32 * param.numel() for param in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    step(x)
    measured = torch.cuda.max_memory_allocated() - others
    profile = debug.memory(step, x, model=model, optimizer=optimizer)
    print(f"recorded {profile.peak / 2**20:.1f} MiB, CUDA {measured / 2**20:.1f}, {profile.peak / measured - 1:+.2%}")
    assert profile.peak == pytest.approx(measured, rel=0.02)


@pytest.mark.cuda
def test_graph_pool():
    """P1: a replayed step is one flat series: the bytes of its pool."""
    forget_others()
    model = make_net("cuda", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    x = torch.randn(64, 3, 8, 8, device="cuda")
    with ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer) as step:
        captured = debug.memory(step, x, model=model, optimizer=optimizer, steps=6)
        replayed = debug.memory(step, x, model=model, optimizer=optimizer, steps=2)
        pool = step.report().bytes - sum(F32 * x.numel() for x in [x])
    assert captured.series["graph pool"][0] == 0
    assert captured.series["graph pool"][-1] == pytest.approx(pool, abs=4096)
    assert set(replayed.series["graph pool"][1:]) == {captured.series["graph pool"][-1]}
    assert max(replayed.series["activation"]) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_a_model_are_parameters(device):
    """P1: running statistics and counters belong to the model."""
    model = make_net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3, 8, 8, device=device)
    profile = debug.memory(make_step(model, optimizer), x, model=model, optimizer=optimizer)
    tensors = [*model.parameters(), *model.buffers()]
    block = 512 if device == "cuda" else 1
    size = sum(-(-tensor.numel() * tensor.element_size() // block) * block for tensor in tensors)
    assert profile.series["parameter"][0] == size
