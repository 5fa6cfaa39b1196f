"""`buckets="auto"`: which sizes are chosen, that all calls pad alike, that a loss must not see the padding."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import rank_lengths
import torch
from harness import ENGINES, leave_out_inductor, marked_line
from rank_cases import Cases, Rows, cases_of
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit import Buckets, InputMismatch
from ampkit._batches import padding
from ampkit._batches.sizes import AIM, choose_sizes, smallest, tokens

WATCHED = 12
Engine = tuple[str, str]
on_cpu = cases_of(rank_lengths.__file__, "cpu", rank_lengths.CASES, 240)
on_gpus = cases_of(rank_lengths.__file__, "cuda", rank_lengths.CASES, 240)


@pytest.fixture(autouse=True)
def few_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "WATCHED", WATCHED)


# ------------------------------------------------------------------------------------------------------- which sizes


def padded_tokens(sizes: Any, seen: Counter[tuple[int, ...]]) -> float:
    held = {real: smallest(sizes, real) for real in seen}
    return sum(tokens(held[real] or (10**9,)) * count for real, count in seen.items())


@pytest.mark.parametrize("seed", range(20))
def test_no_other_sizes_have_fewer_tokens(seed: int) -> None:
    """As few sizes as 12% more tokens allow, and of that many the best ones, found here by trying all."""
    rng = random.Random(seed)
    longest = rng.choice([9, 40, 200])
    seen = Counter((4, rng.randint(1, longest)) for _ in range(11))
    chosen = choose_sizes(seen)
    real = sum(tokens(sizes) * count for sizes, count in seen.items())
    top = max(length for _, length in seen)
    ends = {min(length if length < 64 else -(-length // 8) * 8, top) for _, length in seen} - {top}

    def best(count: int) -> float:
        ways = itertools.combinations(sorted(ends), count - 1)
        return min((padded_tokens([(4, end) for end in (*way, top)], seen) for way in ways), default=float("inf"))

    assert len(chosen) <= 6
    assert padded_tokens(chosen, seen) == min(best(count) for count in range(1, len(chosen) + 1))
    assert len(chosen) == 6 or padded_tokens(chosen, seen) <= (1 + AIM) * real
    assert len(chosen) == 1 or best(len(chosen) - 1) > (1 + AIM) * real


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        ({(32, 128): 199, (7, 128): 1}, ((32, 128),)),  # the last batch of an epoch
        ({(64, 16): 50, (8, 128): 50}, ((8, 128), (64, 16))),  # batches of as many tokens
        ({(32,): 10, (31,): 1}, ((32,),)),
        ({(4, 65): 5, (4, 203): 5}, ((4, 72), (4, 203))),  # a multiple of 8, but no more than the longest
        ({(0, 5): 3}, ((0, 5),)),
    ],
)
def test_sizes(seen: dict[tuple[int, ...], int], chosen: Any) -> None:
    assert choose_sizes(seen) == chosen


# ------------------------------------------------------------------------------------------------------------- value


def test_a_value_like_others() -> None:
    """Buckets without sizes can be hashed and printed, and leave a batch as long as it is."""
    buckets = Buckets("auto", "auto", pad={"batch[1]": -100})
    assert eval(str(buckets)) == buckets
    assert hash(buckets) == hash(Buckets("auto", "auto", (("batch[1]", -100),)))
    (x, _), kwargs = buckets.pad_batch((torch.ones(3, 5), torch.ones(3)), {})
    assert x.shape == kwargs["mask"].shape == (3, 5)
    assert kwargs["mask"].all()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"batch": (4,), "length": "auto"}, r"Buckets\(batch=\(4,\)\): expected 'auto', because"),
        ({"batch": "auto", "length": (8,)}, r"Buckets\(length=\(8,\)\): expected 'auto' or None"),
        ({"batch": "automatic"}, "ints of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Buckets(**kwargs)


# ------------------------------------------------------------------------------------------------------------- steps


class Tagger(nn.Module):
    """Embedding, attention, dropout, and a layer for which `kind` stands."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.qkv, self.head = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)
        self.norm = nn.BatchNorm1d(16) if kind == "norm" else nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.2 if kind == "dropout" else 0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.dropout(self.embedding(x))
        q, k, v = self.qkv(h).view(*x.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = mask.clone()
        seen[:, 0] = True
        if self.kind == "attention":
            seen = torch.ones_like(seen)
        elif self.kind == "zeros":
            seen = x != 0
            seen[:, 0] = True
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])  # HERE attention
        h = h + a.transpose(1, 2).reshape(*x.shape, 16)
        if self.kind == "norm":
            return self.head(self.norm(h.transpose(1, 2)).transpose(1, 2))  # HERE norm
        if self.kind == "pooled":
            h = h + h.mean(1, keepdim=True)  # HERE pooled
        return self.head(self.norm(h))


def loss_of(kind: str) -> Any:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, *, mask: Tensor) -> Any:
        losses = F.cross_entropy(model(x, mask).transpose(1, 2), y, reduction="none")
        if kind == "mean":
            return losses.mean()  # HERE mean
        losses = losses * mask
        if kind == "masked mean":
            return losses.mean()  # HERE masked mean
        if kind == "row mean":
            return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean()  # HERE row mean
        if kind == "nan":
            return (losses.sum(1) / mask.sum(1)).mean()
        return losses.sum() / mask.sum(), losses.sum()

    return loss_fn


def make_all(engine: Engine, kind: str = "dropout", pad: Any = 0, **options: Any) -> tuple[nn.Module, Any, Any]:
    """Return a model, its optimizer and its step, which are the same each time."""
    device, graph = engine
    torch.manual_seed(5)
    model = Tagger(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    buckets = Buckets("auto", "auto", pad=pad) if pad else "auto"
    step = ampkit.graphed_step(loss_of(kind), model, optimizer, buckets=buckets, graph=graph, **options)
    return model, optimizer, step


def make(*args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
    """Return model and step."""
    model, _, step = make_all(*args, **kwargs)
    return model, step


def batches(count: int, device: str = "cpu", longest: int = 20, begin: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 4 samples, each 7th of 3, and of 4 to `longest` tokens."""
    for i in range(begin, begin + count):
        generator = torch.Generator().manual_seed(i)
        length = int(torch.randint(4, longest + 1, (), generator=generator)) if i else longest
        x = torch.randint(1, 50, (3 if i % 7 == 6 else 4, length), generator=generator).to(device)
        yield x, x.roll(-1, 1)


def train(step: Any, count: int, begin: int = 0) -> list[Tensor]:
    """Return the losses of steps with these batches."""
    return [step(*batch).loss for batch in batches(count, begin=begin)]


def result(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    return [*losses, *(tensor.detach().clone() for tensor in model.state_dict().values()), torch.rand(1)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_with_and_without_graphs_pad_alike(engine: Engine) -> None:
    """Bits are equal, dropout included. Batches as they come are eager, and those behind them are mostly replays."""
    device, graph = engine
    found = []
    for how in ("off", graph):
        with taped() if how == "emulate" else nullcontext():
            model, step = make((device, how))
            losses = [step(*batch).loss for batch in batches(100, device)]
            found.append(result(model, losses))
    assert same(*found)
    report = step.report()
    sizes = step.state_dict()["buckets"]["sizes"]
    assert 1 < len(sizes) <= 6
    assert report.captures == report.graphs == len(sizes)
    assert report.eager == {padding.WATCHING: WATCHED, "warm-up": 3 * len(sizes)}
    assert report.padding[0].startswith(f"padded to {sizes[0][0]}x{sizes[0][1]}, ")
    assert "more tokens" in str(report)


def test_the_bits_are_those_of_a_padded_loop() -> None:
    """A loop of torch alone that pads to the same sizes has the same bits, and one that does not has others."""
    model, step = make(("cpu", "emulate"))
    for batch in batches(60):
        step(*batch)
    sizes = [tuple(each) for each in step.state_dict()["buckets"]["sizes"]]
    for pads in (True, False):
        plain, _ = make(("cpu", "off"))
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for i, (x, y) in enumerate(batches(60)):
            size = (smallest(sizes, tuple(x.shape)) if pads and i >= WATCHED else None) or tuple(x.shape)
            grow = (0, size[1] - x.shape[1], 0, size[0] - x.shape[0])
            mask = F.pad(torch.ones_like(x, dtype=torch.bool), grow)
            optimizer.zero_grad()
            loss_of("dropout")(plain, F.pad(x, grow), F.pad(y, grow), mask=mask)[0].backward()
            optimizer.step()
        assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values())) is pads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["scan", "window"])
def test_several_calls_at_once(engine: Engine, method: str) -> None:
    """Stacks are padded as their first slice is, watched too, and leave the bits of single calls."""
    device, graph = engine
    found, launches = [], 0
    for how, one_by_one in ((graph, True), (graph, False), ("off", False)):
        model, step = make((device, how), accumulate=2)
        losses = []
        for x, y in batches(40, device):
            stacked = (torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]))
            if one_by_one:
                losses.append(torch.stack([step(x, y).loss, step(x.flip(0), y.flip(0)).loss]))
            else:
                losses.append(getattr(step, method)(*stacked).loss)
        found.append(result(model, losses))
        launches = max(launches, step.report().launches)
    assert same(found[0], found[1])
    assert same(found[1], found[2])
    assert launches


@pytest.mark.parametrize("stop", [WATCHED - 5, WATCHED, WATCHED + 9])
def test_a_state_goes_on_where_it_was(stop: int) -> None:
    """A new step with the state of the old one, through JSON, leaves the bits of a step that goes on."""
    kind = "ok"  # whose steps draw nothing
    model, whole = make(("cpu", "emulate"), kind)
    expected = [*train(whole, stop + 30)[stop:], *model.parameters()]
    *ended, step = make_all(("cpu", "emulate"), kind)
    train(step, stop)
    *others, resumed = make_all(("cpu", "emulate"), kind)
    for old, new in zip(ended, others, strict=True):
        new.load_state_dict(old.state_dict())
    resumed.load_state_dict(json.loads(json.dumps(step.state_dict())))
    found = train(resumed, 30, begin=stop)
    assert same([*found, *others[0].parameters()], expected)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.state_dict()["buckets"]["sizes"]


def test_a_state_of_another_step() -> None:
    _, step = make(("cpu", "off"))
    state = step.state_dict()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return model(x).sum()

    plain = ampkit.graphed_step(loss_fn, model, optimizer, graph="off")
    assert plain.state_dict() == {}
    plain.load_state_dict({})
    with pytest.raises(ValueError, match="of a step with buckets='auto', and this one pads nothing"):
        plain.load_state_dict(state)
    fixed = ampkit.graphed_step(lambda *a, **k: loss_fn(*a, **k), model, optimizer, graph="off", buckets=Buckets((4,)))
    fixed.load_state_dict(fixed.state_dict())
    with pytest.raises(ValueError, match=r"other buckets='auto', and this one has buckets=Buckets\(batch=\(4,\)"):
        fixed.load_state_dict(state)
    with pytest.raises(ValueError, match="no buckets='auto', and this one has"):
        step.load_state_dict({})
    for _ in range(2):
        step(*next(batches(1)))
    only_batch = ampkit.graphed_step(
        lambda *a, **k: loss_fn(*a, **k), model, optimizer, graph="off", buckets=Buckets("auto")
    )
    with pytest.raises(ValueError, match="other buckets='auto'"):
        only_batch.load_state_dict(step.state_dict())


def test_a_batch_that_is_larger_than_all() -> None:
    """It stays as long as it is: as a size of its own if there are fewer than six, else eagerly, and others go on."""
    _, step = make(("cpu", "emulate"))
    for batch in batches(WATCHED):
        step(*(tensor[:, :4] for tensor in batch))
    long = next(batches(1, longest=30))
    for _ in range(5):
        step(*long)
    assert step.state_dict()["buckets"]["sizes"] == [[4, 4], [4, 30]]
    assert (step.captures, step.replays) == (1, 2)
    for i in range(4):
        step(*next(batches(1, longest=40 + i)))
    assert len(step.state_dict()["buckets"]["sizes"]) == 6
    loss = step(*next(batches(1, longest=50))).loss
    assert loss.isfinite()
    step(*long)
    report = step.report()
    assert report.eager[padding.LARGER] == 1
    assert report.replays == 3


def test_a_short_batch_that_is_longer_than_all() -> None:
    """It gets the batch size of the others."""
    _, step = make(("cpu", "off"))
    for batch in batches(WATCHED + 3):
        step(*batch)
    x, y = next(batches(1, longest=33))
    step(x[:2], y[:2])
    assert [4, 33] in step.state_dict()["buckets"]["sizes"]


def test_sizes_ahead_of_the_first_call() -> None:
    """The first call is padded, random numbers are as they were, and sizes are those that watching would choose."""
    _, watched = make(("cpu", "off"))
    for batch in batches(WATCHED + 1):
        watched(*batch)
    _, step = make(("cpu", "emulate"))

    def loader() -> Iterator[dict[str, Tensor]]:
        for x, y in batches(10**6):
            yield {"x": x[torch.randperm(len(x))], "y": y + random.randrange(2) + int(np.random.randint(2))}

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    step.choose_buckets(loader())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert step.state_dict()["buckets"]["sizes"] == watched.state_dict()["buckets"]["sizes"]
    assert "more tokens" in step.report().padding[0]
    for batch in batches(40):
        step(*batch)
    assert step.report().eager == {"warm-up": 3 * step.captures}


def test_sizes_cannot_be_chosen_ahead() -> None:
    _, step = make(("cpu", "off"))
    with pytest.raises(ValueError, match="there were 7 batches, and sizes are chosen from at least 8"):
        step.choose_buckets(list(batches(7)))
    assert "after 12 calls, of which 0 were made" in step.report().padding[0]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    own = Buckets((4,))
    for buckets, says in ((None, "the step pads nothing"), (own, r"pads to the sizes of Buckets\(batch=\(4,\)")):

        def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
            return model(x).sum()

        other = ampkit.graphed_step(loss_fn, model, optimizer, buckets=buckets, graph="off")
        with pytest.raises(ValueError, match=says):
            other.choose_buckets(list(batches(8)))


def test_batches_without_a_length() -> None:
    """`Buckets("auto")` pads dimension 0 alone."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, *, mask: Tensor) -> Tensor:
        assert mask.dim() == 1
        return (model(x).squeeze(1) * mask).sum() / mask.sum()

    step = ampkit.graphed_step(loss_fn, model, optimizer, buckets=Buckets("auto"), graph="emulate")
    for i in range(40):
        step(torch.randn(2 if i % 9 == 8 else 16, 3))
    assert step.state_dict()["buckets"]["sizes"] == [[16]]
    assert step.replays == 40 - WATCHED - 3


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are watched compile nothing; each size is compiled once."""
    leave_out_inductor(monkeypatch)
    _, step = make(("cpu", "emulate"), "ok", compile="default")
    for batch in batches(WATCHED):
        step(*batch)
    assert not any("forward and backward" in line for line in step.report().compiled)
    for batch in batches(40, begin=WATCHED):
        step(*batch)
    count = len(step.state_dict()["buckets"]["sizes"])
    assert any(f"for {count} layout(s)" in line for line in step.report().compiled)


# ---------------------------------------------------------------------------------------------- losses that see padding


@pytest.mark.parametrize("engine", [*ENGINES, ("cpu", "off")])
@pytest.mark.parametrize("kind", ["norm", "attention", "pooled", "mean", "masked mean", "row mean"])
def test_a_loss_that_sees_the_padding_is_refused(engine: Engine, kind: str) -> None:
    """The message names the line, before any padded step, and the refused call changes nothing."""
    device, _ = engine
    model, step = make(engine, kind)
    done, line = 0, marked_line(__file__, kind)

    def run() -> None:
        nonlocal done, before
        for batch in batches(WATCHED * 2, device):
            before = result(model, [])
            torch.manual_seed(done)
            step(*batch)
            done += 1

    before: list[Tensor] = []
    with pytest.raises(InputMismatch) as caught:
        run()
    assert line in str(caught.value)
    assert done == (6 if kind == "row mean" else 1), "it is told by the first batch that could be padded"
    torch.manual_seed(done)
    now = torch.rand(1)
    torch.manual_seed(done)
    assert torch.equal(torch.rand(1), now)
    assert all(map(torch.equal, before[:-1], model.state_dict().values()))
    assert model.training


def test_a_loss_that_padding_makes_nan_is_refused() -> None:
    _, step = make(("cpu", "off"), "nan")
    with pytest.raises(InputMismatch, match=r"the loss of a batch is \d.*, and nan with padding"):
        train(step, WATCHED)


@pytest.mark.parametrize("kind", ["ok", "dropout"])
def test_a_loss_that_does_not_see_the_padding(kind: str) -> None:
    """It runs a few times more in two calls, and these leave no trace: random numbers are those of a plain loop."""
    model, step = make(("cpu", "off"), kind)
    other, _ = make(("cpu", "off"), kind)
    plain = ampkit.graphed_step(
        loss_of(kind), other, torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True),
        buckets=Buckets((1,), length=(1,)), graph="off",
    )  # fmt: skip
    found = []
    for each, its in ((model, step), (other, plain)):
        torch.manual_seed(1)
        found.append(result(each, [its(*batch).loss for batch in batches(WATCHED)]))
    assert same(*found)


def test_a_number_that_says_what_is_padding() -> None:
    """A model that takes token 0 for padding is refused until `pad` names it."""
    _, step = make(("cpu", "off"), "zeros")
    with pytest.raises(InputMismatch, match=r"name it: Buckets\('auto', 'auto', pad=\{\"batch\[0\]\": 0\}\)"):
        train(step, WATCHED)
    _, step = make(("cpu", "emulate"), "zeros", {"batch[0]": 0})
    for batch in batches(40):
        step(*batch)
    assert step.replays


def test_a_mask_of_the_collate_function() -> None:
    """Masks of the batch, of bool or of 0 and 1, and labels of -100 stay as they are in the padding."""
    model = Tagger("ok")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, keep: Tensor, *, mask: Tensor) -> Tensor:
        return F.cross_entropy(model(x, keep.bool()).transpose(1, 2), y)

    buckets = Buckets("auto", "auto", pad={"batch[1]": -100})
    step = ampkit.graphed_step(loss_fn, model, optimizer, buckets=buckets, graph="emulate")
    for x, y in batches(40):
        step(x, y, torch.ones_like(x))
    assert step.replays


# ------------------------------------------------------------------------------------------------------ several ranks


def check_ranks(rows: Rows) -> None:
    """Assert that all ranks have rank 0's sizes, though rank 1 has longer batches, and the bits of eager steps."""
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["same"]
        assert row["sizes"] == rows[0]["sizes"]
        assert row["captures"]
        assert row["replays"] + row["launches"]
    assert len(rows[0]["sizes"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", rank_lengths.CASES)
def test_ranks_pad_alike(on_cpu: Cases, name: str) -> None:
    check_ranks(on_cpu[name])


@pytest.mark.multigpu
@pytest.mark.parametrize("name", rank_lengths.CASES)
def test_ranks_pad_alike_on_gpus(on_gpus: Cases, name: str) -> None:
    check_ranks(on_gpus[name])
