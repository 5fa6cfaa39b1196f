"""forecast under fully_shard: one process forecasts what `debug.memory` records on the first of several ranks."""

import sys
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import fsdp_memory
import pytest
import torch
import torch.distributed as dist
from rank_cases import Rows, cases_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh

from ampkit import debug

on_cpu = cases_of(fsdp_memory.__file__, "cpu", fsdp_memory.CASES, 240)
four_on_cpu = cases_of(fsdp_memory.__file__, "cpu", fsdp_memory.FOUR_RANKS, 240, ranks=4)
on_gpus = cases_of(fsdp_memory.__file__, "cuda", fsdp_memory.ON_GPUS, 240)
cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that was built with CUDA")


def forecast(name: str, ranks: int = 2, device: str = "cpu") -> debug.MemoryProfile:
    case = fsdp_memory.ALL[name]
    model, x = fsdp_memory.parts(case)
    return debug.forecast(
        fsdp_memory.loss_fn,
        model,
        fsdp_memory.optimizer_of(case, model),
        x,
        policy=case.policy,
        shard=partial(fsdp_memory.shard, case, device),
        ranks=ranks,
        device=device,
        steps=fsdp_memory.STEPS,
    )


def events(profile: debug.MemoryProfile) -> list[Any]:
    """Return what happened, in order: changes of the categories, and the names of steps and phases that begin."""
    names, rows = list(profile.series), list(zip(*profile.series.values(), strict=True))
    marks: dict[int, list[str]] = {}
    for event, name in profile.marks:
        marks.setdefault(event, []).append(name)
    found: list[Any] = []
    for i, (before, after) in enumerate(pairwise(rows), start=1):
        found += marks.get(i, [])
        found.append({name: b - a for name, a, b in zip(names, before, after, strict=True) if a != b})
    return found


def without_copies_of_gloo(profile: debug.MemoryProfile, case: fsdp_memory.Case, ranks: int) -> list[Any]:
    """Return what happened, without the copies that gloo makes of the gradients which it reduces.

    It makes them behind the recorder's back, and copies the result from them where it is seen. So the recorder takes
    them for something that was there before, an input, until they are freed.
    """
    found = events(profile)
    freed = [event["input"] for event in found if "input" in event]
    size = (case.reduce or case.dtype or torch.float32).itemsize
    model, x = fsdp_memory.parts(case)
    shards = ranks // case.copies
    gradients = sum(-(-len(p) // shards) * shards * p[0].numel() for p in model.parameters() if p.requires_grad)
    # A reduction over one rank copies nothing, and the sum over copies of the model is in place.
    assert -sum(freed) == (fsdp_memory.STEPS * gradients * size if shards > 1 else 0)
    assert profile.series["input"][0] == x.nbytes - sum(freed)
    return [event for event in found if "input" not in event]


def without_counts_of_steps(found: list[Any]) -> list[Any]:
    """Return what happened, without the 4 bytes in which Adam counts the steps of a parameter, by default on the CPU.

    They are made where no recorder sees it, and those of a forecast are copied once more.
    """
    return [event for event in found if event not in ({"optimizer state": 4}, {"input": -4})]


def without_sums(found: list[Any]) -> list[Any]:
    """Return what happened, without new memory that takes the place of other memory at once.

    Where gradients meet, autograd adds them in place, but into new memory if somebody watches.
    """
    left: list[Any] = []
    for event in found:
        size = event.get("autograd detail", 0) if isinstance(event, dict) else 0
        if size < 0 and left and left[-1] == {"autograd detail": -size}:
            left.pop()
        else:
            left.append(event)
    return left


def sorted_frees(found: list[Any]) -> list[Any]:
    """Return what happened, with what is freed at once by size: autocast frees its casts in the order of a hash table."""

    def is_free(event: Any) -> bool:
        return not isinstance(event, str) and set(event) == {"temporary"} and event["temporary"] < 0

    groups = groupby(found, is_free)
    return [event for free, group in groups for event in (sorted(group, key=str) if free else group)]


@pytest.mark.parametrize("name", fsdp_memory.CASES)
def test_equals_the_first_of_two_ranks(on_cpu: dict[str, Rows], name: str) -> None:
    """P2: what `debug.memory` records with gloo, event by event. What differs is explained, and taken away by name."""
    check(name, on_cpu[name][0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", fsdp_memory.FOUR_RANKS)
def test_equals_the_first_of_four_ranks(four_on_cpu: dict[str, Rows], name: str) -> None:
    """P2: parameters that are resharded to fewer ranks, and two copies of a split model."""
    check(name, four_on_cpu[name][0], 4)


def check(name: str, row: dict[str, Any], ranks: int) -> None:
    assert "error" not in row, row["error"]
    case = fsdp_memory.ALL[name]
    recorded, profile = debug.MemoryProfile.from_dict(row), forecast(name, ranks)
    expected, found = without_copies_of_gloo(recorded, case, ranks), events(profile)
    if not case.options:
        expected, found = without_counts_of_steps(expected), without_counts_of_steps(found)
    if case.model in ("tied", "transformer"):
        expected, found = without_sums(expected), without_sums(found)
    if case.policy is not None:
        expected, found = sorted_frees(expected), sorted_frees(found)
    assert found == expected
    for category in ("parameter", "gradient", "activation", "temporary"):
        assert profile.series[category][0] == recorded.series[category][0]
        assert max(profile.series[category]) == max(recorded.series[category])


# ------------------------------------------------------------------------------------------------- CUDA without a device


@cuda_build
@pytest.mark.parametrize("name", [*fsdp_memory.CASES, *fsdp_memory.FOUR_RANKS])
def test_on_cuda_without_a_device(name: str) -> None:
    """P2: the forecast for CUDA is that for the CPU, which gloo has confirmed, in blocks of 512 bytes."""
    ranks = 4 if name in fsdp_memory.FOUR_RANKS else 2
    on_cuda = forecast(name, ranks, "cuda")
    assert on_cuda.device == "cuda:0"
    print(name, [event for event in events(on_cuda) if event not in events(forecast(name, ranks))][:5])


def perceptrons(width: int, layers: int) -> Any:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def of_ranks(ranks: int, device: str = "cpu", **options: Any) -> debug.MemoryProfile:
    model = perceptrons(512, 8)

    def shard(model: Any) -> None:
        for layer in (*model, model):
            fully_shard(layer, **options)

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(16, 512)
    return debug.forecast(fsdp_memory.loss_fn, model, optimizer, x, shard=shard, ranks=ranks, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda_build)])
def test_categories(device: str) -> None:
    """P2: an n-th of parameters, gradients and optimizer state for n ranks; what is gathered is temporary."""
    whole = 8 * 512 * 512 * 4
    for ranks in (1, 2, 8):
        profile = of_ranks(ranks, device)
        assert max(profile.series["parameter"]) == whole // ranks
        assert max(profile.series["gradient"]) == whole // ranks
        counts = 8 * (512 if device == "cuda" else 4)
        assert max(profile.series["optimizer state"]) == 2 * whole // ranks + counts
    kept, freed = (of_ranks(8, device, reshard_after_forward=again) for again in (False, True))
    assert max(kept.series["temporary"]) - max(freed.series["temporary"]) > whole // 2
    assert kept.series["parameter"] [-1] == freed.series["parameter"][-1]
