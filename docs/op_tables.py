"""Write op-tables.md: what autocast does to every operation, as ampkit.op_table reads it from the installed torch.

Run `python docs/op_tables.py` after a change of torch; tests/precision/test_op_table.py tells when it is due. The page
is committed, not made by the documentation build, so that a diff shows what an upgrade of torch changed.
"""

import textwrap
from pathlib import Path

import torch

import ampkit
from ampkit._precision.op_table import RULES

PAGE = Path(__file__).with_name("op-tables.md")
VERSION = ".".join(torch.__version__.split(".")[:2])
NAMES = {"cuda": "CUDA", "cpu": "CPU"}
HEAD = f"""\
<!-- Written by docs/op_tables.py. Do not edit. -->
# Autocast rules

What autocast does to the floating inputs of each operation, in torch {VERSION}. The dispatcher says which operations
have an autocast kernel; the rule is seen by calling each on tensors without data and watching the casts. float64 inputs
are never cast. An operation that is not here runs in the dtype of its inputs, by torch's type promotion.

`python -m ampkit ops --device cuda` prints these lists for the torch that you have, also without a GPU;
`ampkit.op_table("cuda")` returns them as a value. To see what an upgrade of torch changes, keep the old table:

```console
$ python -m ampkit ops --device cuda --json before.json
$ pip install --upgrade torch
$ python -m ampkit ops --device cuda --diff before.json
```

The last command prints the operations whose rule changed, and the `Policy(ops=...)` that keeps the old rules. Its exit
code is 0 if no rule changed, 1 if some did, and 2 if the tables cannot be compared.

The names are ATen's: `sum.dim_IntList` is `torch.sum(x, dim)`, what stands behind the dot tells overloads apart.
"""


def page() -> str:
    """Return the text of op-tables.md for the installed torch."""
    return HEAD + "".join(section(device_type) for device_type in NAMES)


def section(device_type: str) -> str:
    """Return the part about one device type, in lines of the repository's width."""
    table = ampkit.op_table(device_type)
    aten = {op for op in table if op.startswith("aten::")}  # torchvision, once imported, registers its own
    parts = [f"\n## {NAMES[device_type]}: {len(aten)} operations\n"]
    for rule, ops in table.by_rule().items():
        names = ", ".join(f"`{op.removeprefix('aten::')}`" for op in ops if op in aten)
        if names:
            parts.append(f"\n### {NAMES[device_type]}: {rule}\n\n{RULES[rule].capitalize()}.\n\n")
            parts.append(textwrap.fill(names, 118, break_long_words=False, break_on_hyphens=False) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
