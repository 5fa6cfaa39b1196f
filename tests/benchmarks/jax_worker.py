"""The training step of an MLP in JAX, as users of JAX write it. Run in a process of its own, without torch.

It reads what to train from a folder and writes there what it measured. `beside_jax` starts it.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIVEN, ARRAYS, RESULT = "given.json", "arrays.npz", "result.json"  # the files in the folder


def step_of(given: dict[str, Any]) -> tuple[Callable[[Any], Any], Callable[[Any, Any], tuple[Any, Any]]]:
    """Return what makes the optimizer's state, and `step((params, state), (inputs, targets))`.

    The step returns the new pair and the loss. It is forward and backward in the compute dtype with float32 weights,
    clipping by the global norm, and AdamW with the cosine schedule of torch's CosineAnnealingLR.
    """
    import jax
    import jax.numpy as jnp
    import optax

    compute = getattr(jnp, given["compute"])

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        x = inputs.astype(compute)
        for i, (weight, bias) in enumerate(params):
            x = x @ weight.astype(compute) + bias.astype(compute)
            if i < len(params) - 1:
                x = jax.nn.relu(x)
        return optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), targets).mean()

    def rate(count: Any) -> Any:
        return 0.5 * given["lr"] * (1 + jnp.cos(jnp.pi * count / given["schedule"]))

    options = {name: given[name] for name in ("b1", "b2", "eps", "weight_decay")}
    optimizer = optax.chain(optax.clip_by_global_norm(given["max_norm"]), optax.adamw(rate, **options))

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return optimizer.init, step


class Training:
    """Trains on the batches in order, again and again.

    Args:
        given: what `beside_jax` has written.
        arrays: weights and batches.
    """

    def __init__(self, given: dict[str, Any], arrays: Any) -> None:
        import jax
        import jax.numpy as jnp

        self._block: Callable[[Any], Any] = jax.block_until_ready
        self._at_once = given["steps_per_call"]  # by lax.scan; 0 for one step per call
        self._batches = [(arrays[f"inputs{i}"], arrays[f"targets{i}"]) for i in range(given["batches"])]
        self._put: Callable[[Any], Any] = jax.device_put
        self._on_device = given["on_device"]
        self._ready: dict[Any, Any] = {}  # batches that were put on the device, or stacked, before
        params = [(jnp.asarray(arrays[f"weight{i}"]), jnp.asarray(arrays[f"bias{i}"])) for i in range(given["layers"])]
        init, step = step_of(given)
        self._carry = (params, init(params))
        self._step = jax.jit(step, donate_argnums=0)
        self._scan = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches), donate_argnums=0)
        self._done = 0

    def run(self, count: int) -> list[float]:
        """Do so many steps. Return their losses. Waits for the device."""
        import numpy

        losses = self._launch(count)
        self._block((self._carry, losses))
        return [float(value) for part in losses for value in numpy.ravel(part)]

    def seconds(self, count: int) -> float:
        """Do so many steps. Return how long they took. Waits for the device before and after them."""
        self._block(self._carry)
        start = time.perf_counter()
        losses = self._launch(count)
        self._block((self._carry, losses))
        return time.perf_counter() - start

    def whole_calls(self, count: int) -> int:
        """Return a number of steps that is made of whole calls, `count` or a little more."""
        return -(-count // self._at_once) * self._at_once if self._at_once else count

    def _launch(self, count: int) -> list[Any]:
        """Launch so many steps; return their losses, on the device."""
        losses = []
        at_once = min(self._at_once, count)
        for _ in range(count // at_once if at_once else count):
            if at_once:
                self._carry, loss = self._scan(self._carry, self._stacked(at_once))
            else:
                self._carry, loss = self._step(self._carry, self._batch())
            losses.append(loss)
            self._done += at_once or 1
        return losses

    def _batch(self) -> Any:
        place = self._done % len(self._batches)
        if not self._on_device:
            return self._put(self._batches[place])
        if place not in self._ready:
            self._ready[place] = self._put(self._batches[place])
        return self._ready[place]

    def _stacked(self, count: int) -> Any:
        """Return the next batches, stacked along a new first dimension."""
        import numpy

        key = self._done % len(self._batches), count
        if key not in self._ready:
            chosen = [self._batches[(key[0] + i) % len(self._batches)] for i in range(count)]
            stacked = tuple(numpy.stack(parts) for parts in zip(*chosen, strict=True))
            self._ready[key] = self._put(stacked) if self._on_device else stacked
        return self._ready[key] if self._on_device else self._put(self._ready[key])


def measured(training: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of the checked steps, milliseconds per step in each block, and the seconds of the set-up."""
    start = time.perf_counter()
    losses = training.run(given["checked"])
    warm_up = training.whole_calls(20)
    training.run(warm_up)
    before = time.perf_counter() - start
    typical = training.seconds(warm_up) / warm_up
    steps = training.whole_calls(max(5, int(min(1000, given["seconds"] / typical))))
    blocks = [training.seconds(steps) / steps * 1e3 for _ in range(given["repeats"])]
    set_up = before - statistics.median(blocks) / 1e3 * (given["checked"] + warm_up)
    return {"losses": losses, "ms": blocks, "setup_s": max(0.0, set_up)}


def main(folder: Path) -> None:
    """Train what the folder says, and write the figures into it."""
    import jax
    import numpy
    import optax

    given = json.loads((folder / GIVEN).read_text())
    with numpy.load(folder / ARRAYS) as arrays:
        training = Training(given, dict(arrays))
    figures = measured(training, given)
    device = jax.local_devices()[0]
    peak = None
    with contextlib.suppress(RuntimeError):  # not every kind of device counts its memory
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    versions = {"jax": jax.__version__, "optax": optax.__version__, "device": str(device.device_kind)}
    (folder / RESULT).write_text(
        json.dumps({**figures, "peak_mib": None if peak is None else peak / 2**20, **versions})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
