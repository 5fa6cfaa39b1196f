"""The parameters of a model as a list, which is made anew only when a module has got or lost something."""

import gc
import operator
from typing import Any

from torch import nn

from .._torch.tensors.modules import module_tables


class Parameters:
    """Lists the parameters of a module, in the order of `module.parameters()`.

    To walk through the modules takes about a microsecond per parameter. To see that nothing has changed takes one call
    of C for all of them.

    Args:
        module: whose parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables: tuple[dict[str, Any], ...] = ()  # of parameters, buffers and children of each module
        self._entries: list[Any] = []  # what is in the tables; kept alive, so that no other object gets its identity
        self._listed: list[nn.Parameter] = []

    def listed(self) -> list[nn.Parameter]:
        """Return the parameters that the module has now. Aliasing: the same list as before if nothing has changed."""
        entries = gc.get_referents(*self._tables)
        if not (entries and len(entries) == len(self._entries) and all(map(operator.is_, entries, self._entries))):
            self._tables = tuple([table for module in self._module.modules() for table in module_tables(module)])
            self._entries = gc.get_referents(*self._tables)
            self._listed = list(self._module.parameters())
        return self._listed
