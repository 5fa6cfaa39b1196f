"""What code tells of a function: the variables that it reads, and what it is given before any call.

Bytecode tells which variables a function reads, and what of them: `alpha`, `config.loss.weights["l1"]`. The objects of
the process tell which functions have this code.
"""

import dis
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from .constants import bases_of, class_table


class Scope(Enum):
    """Where a variable of a function is kept."""

    GLOBAL = "in the module of the function"
    IMPORTED = "among the modules that were imported"
    ENCLOSING = "in a function around it"
    ARGUMENT = "in the function itself, which was given its value"


class PathStep(NamedTuple):
    """An attribute of a value (`.loss`), or an entry (`["l1"]`)."""

    is_attribute: bool
    key: Any

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"


class CodePlace(NamedTuple):
    """An instruction in the code of a function."""

    code: CodeType
    first: int  # where it begins, in bytes; the argument of a long instruction has parts in front of it
    last: int  # where its last part begins
    sets: bool = False  # whether it sets or deletes something, which it does not read


class Read(NamedTuple):
    """An expression in the code of a function: a variable, and what is read of its value, of that value, and so on."""

    scope: Scope
    variable: str
    parts: tuple[PathStep, ...] = ()

    def then(self, part: PathStep) -> "Read":
        """Return the expression that reads a part of this one."""
        return self._replace(parts=(*self.parts, part))


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> Mapping[Read, Sequence[CodePlace]]:
    """Return the longest expressions of this kind, with those of the functions that are defined in the code.

    Each has a list of places in the code, of which it is the last instruction. A local variable that is assigned once
    stands for the expression that it was assigned.
    """
    scan = _BytecodeScan(code)
    table: dict[Read, list[CodePlace]] = {}
    of_new_object = code.co_name in _OF_NEW_OBJECTS
    for read, place in scan.expressions():
        if place.sets and of_new_object and read.scope is Scope.ARGUMENT:
            continue
        table.setdefault(read, []).append(place)
    for inner in code.co_consts:
        for inside, places in reads(inner).items() if isinstance(inner, CodeType) else ():
            if (seen := scan.seen_from_outside(inside)) is not None:
                table.setdefault(seen, []).extend(places)
    return table


@functools.lru_cache(maxsize=1024)
def names(code: CodeType) -> Set[str]:
    """Return the names that code reads attributes by, and its texts, which `getattr` may be given."""
    inside = (each for each in code.co_consts if type(each) is tuple)  # names of arguments, keys of a dict
    texts = (text for text in (*code.co_consts, *chain.from_iterable(inside)) if type(text) is str)
    texts = (text for text in texts if text.isidentifier())
    return {*code.co_names, *texts, *_attributes_matched(code)}


@functools.lru_cache(maxsize=1024)
def names_looked_up(code: CodeType) -> Set[str]:
    """Return as `names` does, but only texts by which code looks something up: entries, or attributes by `getattr`."""
    if not _LOOKING_UP.isdisjoint(code.co_names):
        return names(code)
    found = {*code.co_names, *_attributes_matched(code)}
    texts = list[str]()  # those that were loaded, with nothing but loads behind them
    for each, _ in instructions(code):
        if _is_subscript(each) or each.opname == "CONTAINS_OP":
            found.update(texts)
        texts = texts if each.opname.startswith("LOAD_") else []
        texts += [each.argval] if each.opname in _CONSTANT and isinstance(each.argval, str) else []
    return found


def _attributes_matched(code: CodeType) -> set[str]:
    """Return the attributes by which patterns of `match` look at objects: `case Loss(scale=s)`."""
    if _MATCH_CLASS not in code.co_code[::2]:
        return set()
    pairs = itertools.pairwise(each for each, _ in instructions(code))
    return {name for before, each in pairs if each.opname == "MATCH_CLASS" for name in before.argval}


def instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, CodePlace]]:
    """Yield the instructions of some code, but not of functions that are defined in it."""
    first = None
    for each in dis.get_instructions(code):
        first = each.offset if first is None else first
        if each.opname != "EXTENDED_ARG":
            yield each, CodePlace(code, first, each.offset)
            first = None


@functools.lru_cache(maxsize=1024)
def texts_loaded(code: CodeType) -> Sequence[tuple[str, int, int]]:
    """Return the names that instructions read attributes by and the texts that they load, as in `CodePlace`."""
    found = [(each, place) for each, place in instructions(code) if each.opname not in _SET_ATTRIBUTE]
    texts = ((text, place) for each, place in found for text in _names(each) if isinstance(text, str))
    return tuple((text, place.first, place.last) for text, place in texts)


@functools.lru_cache(maxsize=1024)
def attributes_set(code: CodeType) -> Sequence[tuple[str, CodePlace]]:
    """Return the names of the attributes that instructions set or delete, and where; of an object that is new, none."""
    if code.co_name in _OF_NEW_OBJECTS:
        return ()
    return tuple((each.argval, place) for each, place in instructions(code) if each.opname in _SET_ATTRIBUTE)


@functools.lru_cache(maxsize=1024)
def attributes_read_whole(code: CodeType) -> Sequence[tuple[str, CodePlace]]:
    """Return the names of the attributes that may be dicts of which code reads all, or entries that no constant names:
    `self.weights.values()`, `self.weights[key]`, but not `self.weights["l1"]`."""
    found = [each for each in instructions(code) if each[0].opname not in _NOTHING]
    behind = [*(each for each, _ in found[1:]), None, None]
    whole = list[tuple[str, CodePlace]]()
    for number, (each, place) in enumerate(found):
        first, second = behind[number : number + 2]
        if each.opname not in _ATTRIBUTE or first is None:
            continue
        if first.opname in _ATTRIBUTE:
            looks_up = first.argval in _LOOKING_UP and (second is None or second.opname not in _CONSTANT)
            is_whole = looks_up or first.argval in _ITERATING
        elif first.opname in _CONSTANT:
            is_whole = second is None or not (_is_subscript(second) or second.opname in _WRITE)
        else:
            is_whole = first.opname != "CONTAINS_OP"
        whole += [(each.argval, place)] * is_whole
    return tuple(whole)


def line_of(place: CodePlace) -> tuple[str, int]:
    """Return the file and the number of the line that an instruction is made from."""
    starts = [line for offset, line in _line_starts(place.code) if offset <= place.first and line is not None]
    return place.code.co_filename, starts[-1] if starts else place.code.co_firstlineno


@functools.lru_cache(maxsize=1024)
def _line_starts(code: CodeType) -> Sequence[tuple[int, int | None]]:
    return tuple(dis.findlinestarts(code))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions that are defined in this code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes_in(inner)


class _BytecodeScan:
    """Reads the instructions of a function in their order.

    Instructions that belong to one expression follow each other: one loads the variable, each further one a part. Their
    names differ between versions of Python.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._instructions = [each for each in instructions(code) if each[0].opname not in _NOTHING]
        stored = Counter[str]()
        for each, _ in self._instructions:
            if "STORE" in each.opname:  # STORE_FAST_LOAD_FAST loads the second variable
                stored.update(_names(each)[:1] if "LOAD" in each.opname else _names(each))
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._cells = {*code.co_cellvars, *code.co_freevars}  # which LOAD_FAST loads, since Python 3.13
        self._once = {name for name, times in stored.items() if times == 1}
        self._locals = {name: Read(Scope.ARGUMENT, name) for name in given if name not in stored}

    def expressions(self) -> list[tuple[Read, CodePlace]]:
        """Return the expressions in their order, with the last instruction of each one."""
        found: list[tuple[Read, CodePlace]] = []
        now: Read | None = None  # the expression that the last instructions have loaded
        key: Any = None  # the constant that was loaded behind it, if it may be one
        keyed: Read | None = None  # the expression in front of that
        behind = place = CodePlace(self._code, 0, 0)  # the last instructions of these two expressions
        imported: Read | None = None  # the module that names are imported from
        following = [each.opname for each, _ in self._instructions[1:]]
        for number, ((each, at), then) in enumerate(zip(self._instructions, [*following, ""], strict=True)):
            if keyed is not None and _is_subscript(each):
                now, keyed, place = keyed.then(PathStep(False, key)), None, at
                continue
            if keyed is not None and each.opname in _WRITE:
                found.append((keyed.then(PathStep(False, key)), at._replace(sets=True)))
                keyed = None
                continue
            if now is not None and each.opname in _SET_ATTRIBUTE:
                found.append((now.then(PathStep(True, each.argval)), at._replace(sets=True)))
                now = None
                continue
            if now is not None and each.opname in _ATTRIBUTE:
                now, place = now.then(PathStep(True, each.argval)), at
                continue
            if each.opname == "IMPORT_NAME":  # behind the level and the names that are imported from it
                (level, _), (names, _) = self._instructions[number - 2 : number]
                name = each.argval if names.argval else each.argval.partition(".")[0]
                now = imported = Read(Scope.IMPORTED, "." * level.argval + name)
                keyed, place = None, at
                continue
            if imported is not None and each.opname == "IMPORT_FROM":
                now, place = imported.then(PathStep(True, each.argval)), at
                continue
            if now is not None and each.opname in _COPY and then in _ATTRIBUTE:
                continue  # x.count += 1, which loads x for what it reads and for what it writes
            found += [] if keyed is None else [(keyed, behind)]
            keyed = None
            if each.opname in _CONSTANT:
                now, keyed, key, behind = None, now, each.argval, place
                continue
            if now is not None and each.opname.startswith(_STORE) and _names(each)[0] in self._once:
                self._locals[_names(each)[0]] = now
            elif now is not None:
                found.append((now, place))
            if each.opname in _SET_VARIABLE and (variable := self._assigned(each)) is not None:
                found.append((variable, at._replace(sets=True)))
            *before, now = self._loaded(each)
            found += [(read, at) for read in before if read is not None]
            place = at
        return found

    def seen_from_outside(self, read: Read) -> Read | None:
        """Return what an expression of a function that is defined in this one is for a caller of this one."""
        if read.scope is not Scope.ENCLOSING:
            return None if read.scope is Scope.ARGUMENT else read
        known = self._variable(read.variable)
        return None if known is None else known._replace(parts=(*known.parts, *read.parts))

    def _loaded(self, instruction: dis.Instruction) -> list[Read | None]:
        """Return the variables that an instruction loads, [None] if it loads none."""
        name = instruction.opname
        if name in _GLOBAL:
            return [Read(Scope.GLOBAL, instruction.argval)]
        if name in _CELL:
            return [self._variable(instruction.argval)]
        if "LOAD_FAST" in name:
            names = _names(instruction)
            loaded = names[1:] if name.startswith("STORE") else names
            return [None if each in self._cells else self._locals.get(each) for each in loaded]
        return [None]

    def _assigned(self, instruction: dis.Instruction) -> Read | None:
        """Return the global variable, or that of a function around this one, that an instruction assigns to."""
        name = instruction.argval
        if instruction.opname == "STORE_GLOBAL":
            return Read(Scope.GLOBAL, name)
        return Read(Scope.ENCLOSING, name) if name in self._code.co_freevars else None

    def _variable(self, name: str) -> Read | None:
        return Read(Scope.ENCLOSING, name) if name in self._code.co_freevars else self._locals.get(name)


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables of an instruction: since Python 3.13 one instruction may load or store two."""
    found = instruction.argval
    return found if isinstance(found, tuple) else (found,)


def _is_subscript(instruction: dis.Instruction) -> bool:
    name = instruction.opname  # in Python 3.14 that of a binary operation
    return name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr.startswith("["))


_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_LOOKING_UP = frozenset(
    ("__dict__", "attrgetter", "get", "getattr", "hasattr", "itemgetter", "pop", "setdefault", "vars")
)
_ITERATING = frozenset(("copy", "items", "keys", "values"))
_NOTHING = frozenset(("CACHE", "NOP", "PUSH_NULL", "RESUME"))
_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_CELL = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_OF_NEW_OBJECTS = frozenset(("__init__", "__new__", "__post_init__"))
_SET_ATTRIBUTE = frozenset(("STORE_ATTR", "DELETE_ATTR"))
_WRITE = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))
_SET_VARIABLE = frozenset(("STORE_DEREF", "STORE_GLOBAL"))
_COPY = frozenset(("COPY", "DUP_TOP"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_STORE = ("STORE_FAST", "STORE_DEREF")
_CONSTANT = frozenset(("LOAD_CONST", "LOAD_SMALL_INT"))


class Functions:
    """Finds functions by their code, which is all that a frame tells of the function that is called.

    It knows those that it was told of, and what they have in variables of functions around them. Any other it finds by
    the garbage collector, which sees no functions that were made before `gc.freeze`.

    Args:
        known: functions, methods and calls of `functools.partial`; other values are passed over.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}
        self._by_code: dict[CodeType, list[FunctionType]] = {}
        for value in known:
            self.note(value)

    def note(self, value: Any) -> None:
        """Take note of a value, if it is a function, a method, or made by `functools.partial`."""
        left = [value]
        while left:
            found = left.pop()
            if type(found) not in _CALLED or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            if type(found) is functools.partial:
                left += in_partial(found)
            elif type(found) is MethodType:
                left.append(found.__func__)
            else:
                self._by_code.setdefault(found.__code__, []).append(found)
                left += chain.from_iterable(map(gc.get_referents, found.__closure__ or ()))

    def with_code(self, code: CodeType, *, is_given: bool = False) -> list[FunctionType]:
        """Return the functions with this code.

        If it `is_given`, those that are known are all, if there are any. The others are found among all objects of the
        process, which takes longer than all else here.
        """
        if not (is_given and code in self._by_code):
            for found in gc.get_referrers(code):
                if type(found) is FunctionType and found.__code__ is code:
                    self.note(found)
        return self._by_code.get(code, [])

    def bound(self, code: CodeType, *, is_given: bool = False) -> list[Any]:
        """Return the arguments that functions with this code have by default, or by `functools.partial`."""
        is_given = is_given and code in self._by_code
        functions = self.with_code(code, is_given=is_given)
        for found in gc.get_referrers(*functions) if functions and not is_given else ():
            self.note(found)
        methods = [found for found in self._seen.values() if type(found) is MethodType and found.__func__ in functions]
        for found in gc.get_referrers(*methods) if methods and not is_given else ():
            self.note(found)
        called = {id(found) for found in (*functions, *methods)}
        partials = [found for found in self._seen.values() if type(found) is functools.partial]
        arguments = [(*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()) for each in functions]
        arguments += [in_partial(each)[1:] for each in partials if id(each.func) in called]
        return [*chain.from_iterable(arguments)]


_CALLED = (FunctionType, MethodType, functools.partial)


def in_partial(made: "functools.partial[Any]") -> tuple[Any, ...]:
    """Return the function that `functools.partial` calls, and the arguments that it adds."""
    return (made.func, *made.args, *made.keywords.values())


def functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods and properties of a class by name, but for those that torch's base class of modules has."""
    for base in bases_of(kind):
        for name, value in class_table(base).items() if base not in nn.Module.__mro__ else ():
            function = unbound(value)
            if type(function) is FunctionType:
                yield name, function


def unbound(value: Any) -> Any:
    """Return the function of a property, of a method, or of what is made by `staticmethod` or `classmethod`."""
    if issubclass(type(value), property):
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod, MethodType) else value


def receiver(method: MethodType) -> str:
    """Return the name of a method's first argument, which mostly is `self`."""
    code = getattr(method.__func__, "__code__", None)
    return code.co_varnames[0] if isinstance(code, CodeType) and code.co_argcount else "self"


def given_before(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function is given before any call, and a name for it: the object of a method, arguments of
    `functools.partial`, and those that are given by default."""
    while type(function) is functools.partial:
        yield from (("an argument", value) for value in function.args)
        yield from function.keywords.items()
        function = function.func
    if type(function) is MethodType:
        yield receiver(function), function.__self__
        function = function.__func__
    if type(function) is FunctionType:
        names, values = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
        yield from zip(names[len(names) - len(values) :], values, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
