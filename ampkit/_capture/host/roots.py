"""Which variables the functions that a step calls read, told by their bytecode and by what of it is executed."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..._text import error_line
from ..._torch.compile import never_compile_by_itself, original_code
from ..._torch.tensors.modules import MODULE_CALL, hook_tables, is_module, parts_of
from ..._user_line import is_ampkits, is_in_users_file, is_users_call, is_users_file, line_text
from .code import CodePlace, Functions, PathStep, Read, Scope, codes_in, given_before, line_of, reads, receiver, unbound
from .constants import (
    ABSENT,
    CLOSED_CLASSES,
    MOST_ENTRIES,
    bases_of,
    class_table,
    file_of_module,
    gives_its_entries,
    is_closed,
    is_in_order,
    is_plain,
    module_name,
    own_table,
    package_name,
)
from .executed import Executed
from .objects import File, Reach, Slots

PathKey = tuple[int, str, tuple[PathStep, ...]]
_LISTING = frozenset(("__dict__", "asdict", "astuple", "fields", "vars"))  # what gives all attributes of an object
_WRITING = frozenset(("add", "append", "clear", "discard", "extend", "insert", "remove", "setdefault", "update"))


class Root(NamedTuple):
    """A variable."""

    scope: Scope
    owner: Any  # the global variables of a Python module, the cell of a variable of a function, or the value itself
    name: str

    def value(self) -> Any:
        """Return the value; `ABSENT` if there is none."""
        if self.scope is Scope.GLOBAL:
            return self.owner.get(self.name, ABSENT)
        if self.scope is Scope.ARGUMENT:
            return self.owner
        try:
            return self.owner.cell_contents
        except ValueError:  # not assigned yet
            return ABSENT


class Path(NamedTuple):
    """A variable and what is read of its value, of that value, and so on."""

    root: Root
    parts: tuple[PathStep, ...]

    @property
    def key(self) -> PathKey:
        """Equal for equal paths, as long as the root is kept."""
        return id(self.root.owner), self.root.name, self.parts

    def __str__(self) -> str:
        return "".join((self.root.name, *map(str, self.parts)))

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Yield the table that the value of each part is in, and the value, as far as there are such values."""
        value = self.root.value()
        for part in self.parts:
            table = _table(value, part)
            if table is None:
                return
            value = table[part.key]
            yield table, value

    def values(self) -> list[Any]:
        """Return the value of the variable and those of the parts, as far as there are any."""
        value = self.root.value()
        return [] if value is ABSENT else [value, *[value for _, value in self.steps()]]


def is_left_alone(value: Any) -> bool:
    """Return whether nothing is read of a value: it is plain, or is looked at by itself."""
    return is_plain(value) or is_closed(value)


def _table(value: Any, part: PathStep) -> Any:
    """Return the table that has this part of a value; None if there is none, or if it is looked at by other means."""
    kind, key = type(value), part.key
    if not part.is_attribute:
        if issubclass(kind, dict):
            has_entry = gives_its_entries(kind) and dict.__contains__(value, key)
        else:
            has_entry = is_in_order(kind) and type(key) is int and -len(value) <= key < len(value)
        return value if has_entry else None
    if issubclass(kind, ModuleType):
        module = own_table(value) or {}
        return module if is_users_file(file_of_module(value)) and key in module else None
    if issubclass(kind, type):
        return _of_class(value, key)
    # Of torch's own objects, as optimizers, values that code reads by name; modules are looked at by themselves.
    if is_closed(value) and (is_module(value) or package_name(kind) != "torch"):
        return None
    if key in (slots := Slots(value)):
        return slots
    table = own_table(value)
    if table is not None and key in table:
        return table
    return None if is_left_alone(value) and kind is not FunctionType else _of_class(kind, key)


def _of_class(kind: type, name: str) -> Any:
    """Return the `__dict__` of the class in which a class has its attribute of this name."""
    bases = (base for base in bases_of(kind) if module_name(base) != "builtins")
    return next((class_table(base) for base in bases if name in class_table(base)), None)


class Reader(Enum):
    """What reads a variable."""

    MODULE = "a module that the step calls"
    OPTIMIZER = "the step of an optimizer"
    REST = "the rest of the step"


class Notes:
    """What the functions that a step calls read, told by their bytecode.

    Args:
        look: returns the value of a path and all that is in it, and the files in it by how they are written.
        functions: those of the user's that ampkit calls in a step.
        modules: those that the step may call.
        executed: notes which instructions the step executes. What stands behind an `if` may be read in no call.
    """

    def __init__(
        self,
        look: Callable[[Path], tuple[dict[str, Any], dict[str, File]]],
        functions: Iterable[Any],
        modules: Iterable[nn.Module],
        executed: Executed,
    ) -> None:
        self._look, self._executed, self._modules = look, executed, modules
        self._called = tuple(functions)  # by ampkit
        self._functions = Functions(self._called)
        self.problem: str = ""  # why it cannot be told what the step reads; "" if it can
        self.paths: dict[PathKey, Path] = {}  # what is read
        self.before: dict[PathKey, dict[str, Any]] = {}  # the values when a function that reads it was called
        self.readers: dict[PathKey, set[Reader]] = {}
        self.whole: set[PathKey] = set()  # to objects of which each attribute counts, also those that no code names
        self._compiled: set[PathKey] = set()  # of which torch.compile's code may contain all values
        # The lists, dicts and sets of which a method is called that may change them, and files: each with how it is
        # written, its length before, and the places of the call.
        self._changed: dict[tuple[Any, ...], tuple[str, Any, Any, Iterable[CodePlace]]] = {}
        self._places: dict[PathKey, dict[CodePlace, None]] = {}  # where each path is read
        # By identity, because dynamo makes code that has no hash: what was called, and what that reads; None if it is
        # not of the user's code.
        self._reads: dict[int, tuple[CodeType, Mapping[Read, Sequence[CodePlace]] | None]] = {}
        self._fixed: dict[int, list[tuple[Path, Read]]] = {}  # those that are the same in each call of a function
        self._inner: set[CodeType] = set()  # of functions that are defined by functions that were called
        # By identity: the objects on the paths, which are kept alive here. Functions may be given them.
        self._known: dict[int, tuple[Any, Path]] = {}
        self._owners: dict[PathKey, Path] = {}  # of the paths to methods whose code is not looked at
        self._found: list[nn.Module] = []  # in this call of `take`

    def take(self, frame: FrameType) -> Sequence[nn.Module] | None:
        """Take note of a function that is called. Return the modules that it is found to read; None if no call of its
        code reads anything."""
        self._found = []
        if not self.problem:
            try:
                if not self._take(frame):
                    return self._found or None
            except Exception as error:  # of a class of the user's; it must not end the step
                self.problem = unreadable(error, line_text(frame.f_code.co_filename, frame.f_code.co_firstlineno))
        return self._found

    def _take(self, frame: FrameType) -> bool:
        """Take note of a function that is called. Return whether other calls of its code are to be noted, too."""
        code = frame.f_code
        if id(code) not in self._reads:
            self._reads[id(code)] = code, self._begin(frame)
        _, found = self._reads[id(code)]
        if found is None:
            return False
        self._executed.watch(frame)
        if not found:
            return self._executed.watches_each_call
        reader = _reader(frame)
        given = ((self._given(frame, read), read) for read in found if read.scope is Scope.ARGUMENT)
        for path, read in (*self._fixed[id(code)], *given):
            if path is not None:
                self._add(path, reader, found[read])
                if not _LISTING.isdisjoint(code.co_names):
                    self.whole.add(path.key)
        return True

    def read(self) -> dict[PathKey, tuple[str, int]]:
        """Return the paths that code reads which the step has executed, each with the file and number of a line."""
        found: dict[PathKey, tuple[str, int]] = {}
        for key, places in self._places.items():
            executed = next(filter(self._executed.has, places), None)
            if key in self.paths and (executed is not None or key in self._compiled):
                found[key] = ("", 0) if executed is None else line_of(executed)
        return found

    def set_alone(self) -> set[PathKey]:
        """Return the paths that code has set and not read."""
        executed = {key: [*filter(self._executed.has, places)] for key, places in self._places.items()}
        return {key for key, places in executed.items() if places and all(place.sets for place in places)}

    def grown(self) -> dict[str, tuple[str, int]]:
        """Return the lists, dicts, sets and files with another length than before, each with a line that changes it."""
        found = {}
        for text, table, length, places in self._changed.values():
            executed = next(filter(self._executed.has, places), None)
            if executed is not None and _extent(table) != length:
                found[text] = line_of(executed)
        return found

    def _begin(self, frame: FrameType) -> Mapping[Read, Sequence[CodePlace]] | None:
        """Return what the code of a function reads that is called for the first time; None if that is no matter."""
        code = frame.f_code
        original = original_code(code)
        if original is not None and is_ampkits(frame):  # which compiles what it is given to call
            compiled = [value for value in self._called if any(value is each for each in frame.f_locals.values())]
            for name, value in chain.from_iterable(map(given_before, compiled)):
                self._take_object(name, value)
            self._take_compiled(frame, compiled)
        if not is_in_users_file(frame):
            return None
        if original is not None:
            self._take_what_is_bound(frame, original)
            self._take_compiled(frame, self._functions.with_code(original))
            return None
        found = reads(code)
        is_given = frame.f_back is not None and is_ampkits(frame.f_back)  # ampkit calls only what it was given
        if found and not is_users_call(frame.f_back):
            self._take_what_is_bound(frame, code, is_given=is_given)
        is_around = code not in self._inner and any(read.scope is Scope.ENCLOSING for read in found)
        own = self._functions.with_code(code, is_given=is_given) if is_around else []
        fixed = [(_path(frame.f_globals, None, read), read) for read in found]
        fixed += [(_path({}, function, read), read) for function in own for read in found]
        self._fixed[id(code)] = [(path, read) for path, read in fixed if path is not None]
        self._inner.update(codes_in(code) if found else ())
        return found

    def _take_compiled(self, frame: FrameType, functions: list[Any]) -> None:
        """Take note of functions whose compiled code is called.

        Python calls none of the functions that are a part of it, and reads no number. So all that they could read
        counts, and what is in it.
        """
        reader = _reader(frame)
        hooks = [hook for module in self._modules for table in hook_tables(module) for hook in table.values()]
        for hook in hooks:
            self._take_object("self", hook)
        reach = Reach([*functions, *self._modules, *hooks])
        for function in reach:
            self._executed.compiled.update((function.__code__, *codes_in(function.__code__)))
            for read, places in reads(function.__code__).items():
                path = _path(function.__globals__, function, read)
                if path is None:
                    continue
                self._add_compiled(path, reader, places)
                values = path.values()
                reach.add(values[-1:])
                if len(values) > 1 and hasattr(type(values[-1]), "__get__"):  # a method, which reads its object
                    self._add_compiled(path._replace(parts=path.parts[: len(values) - 2]), reader, places)
        for _, path in list(self._known.values()):
            if path.root.scope is Scope.ARGUMENT:
                self._add_compiled(path, reader, [])

    def _add_compiled(self, path: Path, reader: Reader, places: Sequence[CodePlace]) -> None:
        self._compiled.add(path.key)
        self._add(path, reader, places)

    def _given(self, frame: FrameType, read: Read) -> Path | None:
        """Return the path of what is read of an argument; None if the argument was not on the path of a variable."""
        value: Any = frame.f_locals.get(read.variable)
        if id(value) not in self._known:
            is_class = issubclass(type(value), type) and package_name(value) not in CLOSED_CLASSES
            # An object that a package calls, as torch calls a hook that is one.
            by_user = frame.f_back is not None and is_in_users_file(frame.f_back)
            is_bound = read.variable == _receiver_in(frame) and not is_left_alone(value) and not by_user
            if not is_class and not is_bound:
                return None
            self._known[id(value)] = value, Path(Root(Scope.ARGUMENT, value, read.variable), ())
        _, path = self._known[id(value)]
        return Path(path.root, (*path.parts, *read.parts))

    def _take_what_is_bound(self, frame: FrameType, code: CodeType, *, is_given: bool = False) -> None:
        """Take note of what a function that ampkit calls is given, and not by the call.

        It is the object that a method belongs to, what `functools.partial` adds, and what arguments are by default.
        """
        given = [(name, value) for name, value in frame.f_locals.items() if not is_left_alone(value)]
        own = _receiver_in(frame)
        is_alone = all(name == own for name, _ in given)
        bound = set[int]() if is_alone else set(map(id, self._functions.bound(code, is_given=is_given)))
        for name, value in given:
            if name == own or id(value) in bound:
                self._take_object(name, value)

    def _take_object(self, name: str, value: Any) -> None:
        if not is_left_alone(value):
            self._known.setdefault(id(value), (value, Path(Root(Scope.ARGUMENT, value, name), ())))

    def _add(self, path: Path, reader: Reader, places: Sequence[CodePlace]) -> None:
        self._places.setdefault(path.key, {}).update(dict.fromkeys(places))
        if path.key in self._owners:
            self._add(self._owners[path.key], reader, places)
        if path.key in self.paths:
            self.readers[path.key].add(reader)
        values = path.values()
        part = path.parts[len(values) - 1] if 0 < len(values) <= len(path.parts) else None
        if part is not None and issubclass(type(values[-1]), (dict, list, set)) and part.key in _WRITING:
            text = str(path._replace(parts=path.parts[: len(values) - 1]))
            self._changed.setdefault(path.key, (text, values[-1], len(values[-1]), places))
            return
        if path.key in self.paths:
            return
        self.readers[path.key] = {reader}
        self.paths[path.key] = path
        self.before[path.key], files = self._look(path)
        for text, file in files.items():
            self._changed[(*path.key, text)] = text, file, _extent(file), self._places[path.key]
        if len(values) > 1 and _reads_unseen(values[-1]):
            self._owners[path.key] = owner = path._replace(parts=path.parts[: len(values) - 2])
            self._add(owner, reader, places)
            function = unbound(values[-1])
            if type(function) is not FunctionType or "-packages" not in function.__code__.co_filename:
                self.whole.add(owner.key)  # the code of a package is watched, and tells names
        for depth, value in enumerate(values):
            self._functions.note(value)
            if is_module(value) and id(value) not in self._known:
                self._found += parts_of(value)
            if type(value) is MethodType:
                self._take_object(receiver(value), value.__self__)
            reached = [(value, path.parts[:depth])]
            if type(value) in (dict, list, tuple) and len(value) <= MOST_ENTRIES:  # which is read by a key of its own
                entries = value.items() if type(value) is dict else enumerate(value)
                steps = [(entry, PathStep(False, key)) for key, entry in entries if is_plain(key)]
                reached += [(entry, (*path.parts[:depth], step)) for entry, step in steps]
            for each, parts in reached:
                if not is_plain(each) or isinstance(each, Tensor):
                    self._known.setdefault(id(each), (each, Path(path.root, parts)))


def unreadable(error: Exception, function: str = "") -> str:
    """Return in words that an object of the user's raised an error where ampkit looked at it."""
    where = f" (read in {function})" if function else ""
    return (
        f"An object that the step reads{where} raises where ampkit looks for what could change in it: "
        f"{error_line(error)}. So no change would be noticed. Pass what the step needs of it as an argument."
    )


def _extent(table: Any) -> Any:
    """Return how long a list, dict or set is, or how far a file has been written, or read."""
    return table.read() if isinstance(table, File) else len(table)


def _reads_unseen(value: Any) -> bool:
    """Return whether this is a method or property that may read all of its object, and has no code of the user's."""
    function = unbound(value)
    if type(function) is FunctionType:
        return not is_users_file(function.__code__.co_filename)
    return type(function) in (MethodDescriptorType, GetSetDescriptorType)  # written in C


def _path(variables: dict[str, Any], function: FunctionType | None, read: Read) -> Path | None:
    """Return the path of a global variable, or of one of the functions around a function; None if it is neither."""
    if read.scope is Scope.GLOBAL and read.variable in variables:
        return Path(Root(Scope.GLOBAL, variables, read.variable), read.parts)
    if read.scope is Scope.IMPORTED and function is None:
        name = importlib.util.resolve_name(read.variable, variables.get("__package__") or "")
        return Path(Root(Scope.GLOBAL, sys.modules, name), read.parts) if name in sys.modules else None
    if read.scope is Scope.ENCLOSING and function is not None and function.__closure__:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        return Path(Root(Scope.ENCLOSING, cells[read.variable], read.variable), read.parts)
    return None


def _receiver_in(frame: FrameType) -> str:
    """Return the name of the variable that has the object of a method: `self`, or else that of its first argument."""
    code = frame.f_code
    if "self" in frame.f_locals or not code.co_argcount:
        return "self"
    first = code.co_varnames[0]
    found = [class_table(kind).get(code.co_name) for kind in bases_of(type(frame.f_locals.get(first)))]
    return first if any(type(each) is FunctionType and each.__code__ is code for each in found) else "self"


def _reader(frame: FrameType | None) -> Reader:
    """Return what a function is called for."""
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            return Reader.MODULE
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return Reader.OPTIMIZER
        frame = frame.f_back
    return Reader.REST


never_compile_by_itself(Notes.take)
