"""Models of transformers with their default flags are captured, with the bits of eager."""

import foreign_models
import pytest
from foreign_models import MODELS, SIZES, Case

STEPS = 7
ENGINES = [("cpu", "emulate"), pytest.param(("cuda", "auto"), marks=pytest.mark.cuda)]


@pytest.mark.parametrize("policy", foreign_models.POLICIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.quick(4)
def test_default_flags_have_the_bits_of_eager(engine: tuple[str, str], name: str, policy: str) -> None:
    """R1, R2: masks and attention are those of the eager call, though the code asks whether it is being captured."""
    pytest.importorskip("transformers")
    device, graph = engine
    row = foreign_models.check(Case(name, device, SIZES["cpu"]), policy, graph, STEPS)
    assert not row["failure"]
    assert not row["warnings"]
    assert (row["captures"], row["replays"]) == (1, STEPS - 3)
    assert row["deterministic"]
    assert row["bitwise"], f"{row['differing']}: {row['distance']} from eager"
