"""Which Linear layers compute in float8 where the policy leaves that to timing: chosen behind the first call of a step.

A product gains by float8 only if it is large: the casts of input, weight and gradient cost time that a small one does
not earn back. Where that begins depends on the GPU, the recipe and the compiler, so each size is timed once, forward
and backward, in a CUDA graph of its own. The choice is a part of the training run: it goes on from a checkpoint.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..._errors import AmpkitWarning
from ..._precision.float8 import IF_FASTER, MULTIPLE, RECIPES, chooses, why_not_on
from ..._precision.float8_layers import PLAIN, Float8Choice, expect_choice, noting_rows
from ..._precision.module_rules import ModuleRules, choose_float8, float8_layers
from ..._precision.policy import Policy
from ..._user_line import users_level
from ..training_step import TrainingStep
from .compiled import CompiledTrainingStep
from .float8_timing import TimedLayer, times_of

GAIN = 1.03  # how many times as long a layer must take without float8 to get it
TIMED_ON = ("cuda",)


class Float8Chooser:
    """Chooses the form of each layer of a model that a float8 rule leaves to timing, once.

    Args:
        policy: the policy of the step, which is on the model.
        model: the model, or a wrapper around it.
        step: the training step. If it is compiled, what is timed is compiled too.

    Raises:
        ValueError: the policy names layers, and the device has no float8.
    """

    def __init__(self, policy: Policy | None, model: nn.Module, step: TrainingStep) -> None:
        self._policy, self._step = policy, step
        rules = None if policy is None else ModuleRules(policy.modules, policy.params, policy.output)
        self._model = next((module for module in model.modules() if rules and float8_layers(module, rules)), None)
        self._times: dict[TimedLayer, tuple[float, float] | str] = {}
        if self._model is not None:
            self._look_at_device()
            expect_choice(map(self._model.get_submodule, self._open))

    @property
    def layers(self) -> dict[str, Float8Choice]:
        """The layers under a float8 rule by path."""
        return {} if self._model is None else float8_layers(self._model)

    @property
    def _open(self) -> dict[str, str]:
        """The rules of the layers that are not chosen yet."""
        return {path: layer.form for path, layer in self.layers.items() if chooses(layer.form)}

    @property
    def pending(self) -> bool:
        """Whether there is something to choose."""
        return bool(self._open)

    @property
    def _has_chosen(self) -> bool:
        rules = () if self._policy is None else self._policy.modules
        return any(chooses(rule) for _, rule in rules) and not self.pending

    @property
    def policy(self) -> Policy | None:
        """The policy with a rule for each layer that computes in float8, in place of those that leave it to timing."""
        if self._policy is None or self._model is None or not self._has_chosen:
            return self._policy
        kept = [(key, rule) for key, rule in self._policy.modules if not chooses(rule)]
        named = _in_float8(self.layers)
        rules = [*((key, rule) for key, rule in kept if key not in named), *named.items()]
        old = self._policy
        return Policy(old.params, old.compute, old.output, old.ops, rules, old.rounding)

    def _look_at_device(self) -> None:
        device = self._step.device
        problem = why_not_on(device)
        forced = [*_in_float8(self.layers)]
        if problem and forced:
            raise ValueError(
                f"graphed_step(policy={str(self._policy)!r}): {forced[0]} is to compute in float8, but {problem}. "
                "Leave out the rule, or write compute='float8', which falls back to bfloat16."
            )
        if problem and self.pending:
            warnings.warn(
                f"graphed_step: no layer computes in float8: {problem}.", AmpkitWarning, stacklevel=users_level()
            )
            self._set({path: Float8Choice(PLAIN, problem) for path in self._open})
        elif device.type == "cpu" and (forced or self.pending):
            warnings.warn(
                "graphed_step: the CPU has no float8 products. torchao emulates them, slowly, which is for tests.",
                AmpkitWarning,
                stacklevel=users_level(),
            )

    def first_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do a call in which nothing is chosen yet, and choose behind it. Waits for the device, and for other ranks."""
        with noting_rows() as seen:
            out = call(*args, **kwargs)
        assert self._model is not None  # or nothing is pending
        ranks = self._step.ranks
        chosen = None
        if ranks.is_first:
            model = self._model
            chosen = {path: self._choice(model.get_submodule(path), form, seen) for path, form in self._open.items()}
        self._set(ranks.of_first(chosen))
        return out

    def _set(self, layers: Mapping[str, Float8Choice]) -> None:
        assert self._model is not None  # or there are no layers
        choose_float8(self._model, layers)

    def _choice(self, layer: Any, form: str, seen: Mapping[nn.Module, int]) -> Float8Choice:
        if layer not in seen:
            return Float8Choice(PLAIN, "the first call did not call it in training mode, or in compiled code")
        timed = TimedLayer(
            form.removesuffix(IF_FASTER),
            (seen[layer], layer.in_features, layer.out_features),
            layer.bias is not None,
            layer.weight.dtype,
        )
        if timed.sizes[0] % MULTIPLE:
            return Float8Choice(PLAIN, f"it gets {timed.sizes[0]} rows, no multiple of {MULTIPLE}", timed.sizes)
        if self._step.device.type not in TIMED_ON:
            return Float8Choice(timed.recipe, "emulated: nothing is timed on a CPU", timed.sizes)
        if timed not in self._times:
            compiler = self._step.compiler if isinstance(self._step, CompiledTrainingStep) else None
            self._times[timed] = times_of(timed, self._step.device, compiler)
        times = self._times[timed]
        if isinstance(times, str):
            return Float8Choice(PLAIN, f"it could not be timed: {times}", timed.sizes)
        gain = times[0] / times[1]
        chosen = timed.recipe if gain >= GAIN else PLAIN
        return Float8Choice(chosen, f"{gain:.2f} times as fast in float8", timed.sizes, times)

    def report(self) -> tuple[str, ...]:
        """Return what a report says of the layers, in words."""
        layers = self.layers.values()
        if not layers:
            return ()
        if self.pending:
            return ("float8: nothing is chosen before the first call",)
        return (f"float8: {len(_in_float8(self.layers))} of {len(layers)} Linear layers with a rule",)

    def state_dict(self) -> dict[str, Any]:
        """Return the choice in dicts and lists; {} if there is none."""
        layers = self.layers.items() if self._has_chosen else ()
        return {path: [[*each] if isinstance(each, tuple) else each for each in layer] for path, layer in layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on with the choice of another step. Return whether it is another one. Raise a `ValueError` if this model
        or device cannot.
        """
        loaded = {
            path: Float8Choice._make(tuple(each) if isinstance(each, list) else each for each in layer)
            for path, layer in state.items()
        }
        if not loaded or (not self.pending and _in_float8(loaded) == _in_float8(self.layers)):
            return False  # a policy may name what was chosen
        odd = sorted(loaded.keys() ^ self.layers.keys())
        odd += [path for path, layer in loaded.items() if layer.form not in (PLAIN, *RECIPES)]
        if odd:
            raise ValueError(
                f"load_state_dict: the state has a choice for {len(state)} layers under float8 rules, and this model "
                f"has {len(self.layers)}; they differ in {odd[0]}. Apply the policy of the run that saved it."
            )
        problem = why_not_on(self._step.device)
        if problem and _in_float8(loaded):
            raise ValueError(f"load_state_dict: layers were chosen to compute in float8, but {problem}.")
        self._set(loaded)
        return True


def _in_float8(layers: Mapping[str, Float8Choice]) -> dict[str, str]:
    """Return the recipes of the layers that compute in float8."""
    return {path: layer.form for path, layer in layers.items() if layer.form in RECIPES}
