"""Global variables that a step reads, variables of functions around it, and attributes of objects in them.

A graph holds their values as constants.
"""

import functools
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..._torch.tensors.modules import is_module
from .code import Scope
from .constants import (
    ABSENT,
    MOST_ENTRIES,
    are_same,
    file_of_module,
    getter,
    is_array,
    is_plain,
    module_name,
    noted,
    own_table,
    reference,
    size,
)
from .executed import Executed
from .objects import Holder, any_name, holders, holds_others
from .roots import Notes, Path, PathKey, Reader, is_left_alone, unreadable

_ENTRIES = re.compile(r"(\[[^\]]*\])+$")  # at the end of a text
_ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)")

Place = tuple[PathKey, str]  # a path, and what is written behind it


@dataclass(frozen=True, eq=False)
class VariableValues:
    """The values of variables, and of what is read of them.

    Two of these are equal if the paths that both looked at have the same values.

    Attributes:
        found: by path, by what is written behind it: a number, text or function itself, a weak reference of a tensor
            or of an object that nothing is read of, and the type of any other object.
        names: how each path is written.
        changing: what calls change, which is not compared.
        is_read: returns whether attributes of this name were looked at in objects.
    """

    found: dict[PathKey, dict[str, Any]]
    names: dict[PathKey, str]
    changing: frozenset[Place] = frozenset()
    is_read: Callable[[str], bool] = any_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableValues) and not any(True for _ in self.different(other))

    def __hash__(self) -> int:
        return hash(VariableValues)

    def named(self) -> dict[str, Any]:
        """Return the values by how messages name them."""
        return {
            f"the variable {self.names[key]}{text}": value
            for key, found in self.found.items()
            for text, value in found.items()
            if not _is_among(self.changing, key, text)
        }

    def changed(self, new: "VariableValues") -> dict[str, tuple[Any, Any]]:
        """Return the old and the new value of each variable that is another one now, by how it is written."""
        found: dict[str, tuple[Any, Any]] = {}
        for key, text in self.different(new):
            old, now = self.found[key].get(text, ABSENT), new.found[key].get(text, ABSENT)
            name = f"{self.names[key]}{text}"
            # Behind a tensor that is another one, as in CACHE.shape[0], nothing more is said.
            if not any(name.startswith((f"{known}.", f"{known}[")) and old is was for known, (was, _) in found.items()):
                found[name] = old, now
        return found

    def different(self, other: "VariableValues") -> Iterator[Place]:
        """Yield what has another value in the other one."""
        left = self.changing | other.changing

        def both_look(text: str) -> bool:
            names = _ATTRIBUTE.findall(text)
            return all(map(self.is_read, names)) and all(map(other.is_read, names))

        for key, old in self.found.items():
            now = other.found.get(key)
            for text in {} if now is None else {**old, **now}:
                was, becomes = old.get(text, ABSENT), (now or {}).get(text, ABSENT)
                is_known = (was is not ABSENT and becomes is not ABSENT) or both_look(text)
                if is_known and not _is_among(left, key, text) and not are_same(was, becomes):
                    yield key, text


class Variables:
    """Which variables are compared from call to call, and what reads them.

    They are those that the user's own code reads. Which code that is, a step that is watched shows. What a step changes
    itself is not compared, since a replay would not change it.

    Args:
        names_read: see `Attributes`.
        functions: those of the user's that ampkit calls in a step.
    """

    def __init__(self, names_read: Callable[[], Callable[[str], bool]], functions: Iterable[Any] = ()) -> None:
        self._names_read, self._functions = names_read, tuple(functions)
        self._paths: dict[PathKey, Path] = {}
        self._readers: dict[PathKey, set[Reader]] = {}
        self._start = VariableValues({}, {})  # of the call that notes are taken of
        self._compiled: set[PathKey] = set()  # of these, all that is in objects counts
        # What calls change. The paths are kept, so that no others get their keys.
        self._changing: dict[Place, Path] = {}
        self._rewritten: set[Place] = set()  # what the last call that read it has changed, and is compared
        self._left_out: dict[PathKey, Path] = {}  # for good
        self._problem = ""

    def notes(self, modules: Iterable[nn.Module], executed: Executed) -> Notes:
        """Return notes to be taken while a step runs.

        Args:
            modules: those that the step may call.
            executed: notes meanwhile which instructions the step executes.
        """

        self._start = self._values(self._known())
        return Notes(lambda path: self._look(path, any_name), self._functions, modules, executed)

    def learn(self, notes: Notes, *, in_parts: bool = False) -> None:
        """Compare what a step has read from now on. To be called at its end.

        Args:
            notes: those that were taken.
            in_parts: whether only modules are captured. Then what the rest of the step reads is not compared.
        """
        try:
            self._learn(notes, in_parts)
        except Exception as error:  # of a class of the user's; it must not end the step
            notes.problem = notes.problem or unreadable(error)
        self._problem = notes.problem

    def take_problem(self) -> str:
        """Return why it could not be told what the last step read, "" if it could; then forget it."""
        problem, self._problem = self._problem, ""
        return problem

    def _learn(self, notes: Notes, in_parts: bool) -> None:
        before, after = (VariableValues(found, {}) for found in (notes.before, notes.values()))
        read = dict.fromkeys(filter(notes.is_read, notes.paths))
        if in_parts:
            read = {key: None for key in read if Reader.MODULE in notes.readers[key]}
        paths = {**self._known(), **notes.paths}
        written = {_as_a_whole(paths[key], text) for key, text in self._start.different(self._values(self._known()))}
        rewritten = {_as_a_whole(paths[key], text) for key, text in before.different(after)}
        # Of a tensor that is made where there is none, or a longer one is needed, graphs must know which one they have.
        kept = {
            place
            for place in rewritten & {(key, text) for key, found in after.found.items() for text in found}
            if _is_reference(after.found[place[0]][place[1]])
            and place[0] in self._paths
            and place not in self._rewritten
        }
        self._rewritten = {place for place in self._rewritten if place[0] not in read} | kept
        # A function may read what another one has written before it was called: then only a later call shows that.
        changed = (written | rewritten) - kept
        for place in self._changing.keys() - changed:
            key, text = place
            if key in read and _is_reference(after.found[key].get(text)):
                del self._changing[place]
        self._changing.update({place: paths[place[0]] for place in changed})
        for key in read:
            self._paths[key] = notes.paths[key]
            self._compiled |= notes.compiled & {key}
            self._readers[key] = self._readers.get(key, set()) | notes.readers[key]
        self._drop_what_is_left_out()

    def leave_out(self, names: Iterable[str]) -> None:
        """Do not compare variables and attributes with these names. Something else does."""
        left = set(names)
        self._left_out.update({key: path for key, path in self._paths.items() if path.last_name in left})
        self._drop_what_is_left_out()

    def forget(self) -> None:
        """Compare nothing any more."""
        for table in (self._paths, self._readers, self._compiled, self._left_out, self._changing, self._rewritten):
            table.clear()

    def are_of_optimizers(self, old: VariableValues, new: VariableValues) -> bool:
        """Return whether steps of optimizers read all that has changed, and nothing else does."""
        readers = [self._readers.get(key, set()) for key, _ in old.different(new)]
        return bool(readers) and all(found == {Reader.OPTIMIZER} for found in readers)

    def values(self) -> VariableValues:
        """Return the values that the variables have now."""
        return replace(self._values(self._paths), changing=frozenset(self._changing))

    def _values(self, paths: dict[PathKey, Path]) -> VariableValues:
        found = {key: self._look(path) for key, path in paths.items()}
        return VariableValues(found, {key: path.followed() for key, path in paths.items()}, is_read=self._names_read())

    def _known(self) -> dict[PathKey, Path]:
        """Return the paths that are compared, and those that calls change."""
        return {**{key: path for (key, _), path in self._changing.items()}, **self._paths}

    def _drop_what_is_left_out(self) -> None:
        left = self._left_out.keys() | {key for key, text in self._changing if not text}
        self._paths = {key: path for key, path in self._paths.items() if key not in left}

    def readers(self) -> tuple[list[Any], list[Any]]:
        """Return functions that read what the values depend on, and the table to pass to each of them.

        A function returns a tuple. It raises a `KeyError` or `IndexError` if an entry is gone.
        """
        read: dict[int, tuple[Any, dict[Any, None]]] = {}
        found: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        for path in self._paths.values():
            pairs = [(table, [part.key]) for part, (table, _) in zip(path.parts, path.steps(), strict=False)]
            if path.root.scope is Scope.GLOBAL and path.root.value() is not ABSENT:
                pairs.append((path.root.owner, [path.root.name]))
            for table, keys in pairs:
                read.setdefault(id(table), (table, {}))[1].update(dict.fromkeys(keys))
            inside = ((holder.reader(), holder.table) for holder in self._contents(path))
            found += [(reader, table) for reader, table in inside if reader is not None]
        found += [(getter(list(keys), type(table)), table) for table, keys in read.values() if keys]
        roots = (path.root for path in self._paths.values() if path.root.scope is Scope.GLOBAL)
        found += [(_is_there(root.name), root.owner) for root in roots if root.value() is ABSENT]
        return [reader for reader, _ in found], [table for _, table in found]

    def cells(self) -> list[Any]:
        """Return the cells that variables of functions are kept in."""
        cells = (path.root.owner for path in self._paths.values() if path.root.scope is Scope.ENCLOSING)
        return list({id(cell): cell for cell in cells}.values())

    def tables(self) -> list[Any]:
        """Return what may get a further entry that counts: objects, where it may hide an attribute of their class, and
        what is compared with all that is in it."""
        paths = self._paths.values()
        inside = [holder.table for path in paths for holder in self._contents(path)]
        owned = [own_table(value) for path in paths for value in path.values() if not is_left_alone(value)]
        return list({id(table): table for table in (*inside, *owned) if table is not None}.values())

    def modules(self) -> list[nn.Module]:
        """Return the modules that variables lead to."""
        values = (path.values() for path in self._paths.values())
        return [value for found in values for value in found[-1:] if is_module(value)]

    def _look(self, path: Path, is_read: Callable[[str], bool] | None = None) -> dict[str, Any]:
        """Return the values of a path; with `is_read`, also what is in an object by names for which that is true."""
        found: dict[str, Any] = {}
        for value in path.values()[-1:]:
            found[""] = noted(value) if is_plain(value) else _stand_in(value)
        for holder in self._contents(path, is_read):
            found.update(holder.found())
        return found

    def _contents(self, path: Path, is_read: Callable[[str], bool] | None = None) -> Iterator[Holder]:
        """Yield what is in the last value of a path, which code may read by other ways than bytecode tells.

        It is what code reads by the names of attributes, wherever it stands. Of a small dict it is each entry.
        """
        for value in path.values()[-1:]:
            all_entries = _is_table(value) and size(value) <= MOST_ENTRIES
            yield from holders(value, is_read or self._names_read(), set(), all_entries=all_entries)


def _is_among(places: Container[Place], key: PathKey, text: str) -> bool:
    """Return whether this is one of the places, or an entry of one."""
    return (key, text) in places or (key, _ENTRIES.sub("", text)) in places


def _as_a_whole(path: Path, text: str) -> Place:
    """Return what counts as changed if this has another value: of a list or dict all that is in it."""
    whole = _ENTRIES.sub("", text)
    return path.key, whole if whole or any(map(_is_table, path.values()[-1:])) else text


def _is_reference(noted: Any) -> bool:
    """Return whether this is what is noted of a tensor, or of another object that is compared by which one it is."""
    return type(noted) is weakref.ref


def _is_there(name: str) -> Callable[[dict[str, Any]], tuple[bool]]:
    return lambda table: (name in table,)


def _stand_in(value: Any) -> Any:
    """Return what stands for an object that is not plain: for most, what is read of them is compared instead.

    The type of an object, and not `isinstance`, tells what it is, since weak proxies may be of objects that are gone.
    """
    is_read = holds_others(value) and (is_array(value) or not _is_of_package(value))
    return type(value) if _is_table(value) or is_read else reference(value)


def _is_of_package(value: Any) -> bool:
    """Return whether code that is not looked at may read attributes of this object, or keeps its values elsewhere."""
    module = sys.modules.get(module_name(type(value)))
    return type(value) is functools.partial or (module is not None and "-packages" in file_of_module(module))


def _is_table(value: Any) -> bool:
    return issubclass(type(value), (dict, list))
