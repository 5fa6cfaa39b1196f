"""What to write where code of a library is what cannot be captured, and an option of the library's avoids it."""

from ..._user_line import SourceLocation

# Parts of the path of torch's line, or of the library's, and what to write.
_REMEDIES = (
    (
        ("torch/distributions/distribution.py", "torch/distributions/constraints.py"),
        "It checks arguments: pass validate_args=False to the distribution, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once.",
    ),
    (
        ("torch/nn/modules/transformer.py",),
        "It looks whether the mask is causal: pass tgt_is_causal (nn.TransformerDecoder, nn.Transformer) or is_causal "
        "(nn.TransformerEncoder) as True or False.",
    ),
    (
        ("torch_geometric/utils/loop.py", "torch_geometric/nn/conv/gcn_conv.py"),
        "Add the self-loops before the first step and pass add_self_loops=False to the layers; GCNConv(cached=True) "
        "does so for a graph that stays the same.",
    ),
    (("/torchmetrics/",), "Update metrics behind the step, with tensors that it returns."),
)


def remedy(place: SourceLocation) -> str:
    """Return what to write instead of what happens there, "" if that is in no library which is known here."""
    where = place.inside, place.line.replace("\\", "/").partition(": `")[0]
    return next((text for parts, text in _REMEDIES if any(part in each for part in parts for each in where)), "")
