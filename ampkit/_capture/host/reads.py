"""Which values of the host a step reads, and whether they are what they were in the last call.

**What is to be noticed.** A graph holds all numbers that Python computed in the capture as constants: the `p` of a
dropout, `CONFIG.loss["l1"]`, a variable of the function around the step. A replay runs no Python, so it would go on
with them after the user has set another one. So each call compares what the step has read, and finds another graph, or
captures one, where something is different. Two things must not happen. A change that counts goes unnoticed: then the
numbers are wrong without a word. Something is compared that no graph depends on, as the step's own count of its calls:
then each call differs from the one before, and nothing is ever captured.

**What does not do.**
- *Compare all that can be reached* from the modules and globals. One counter that nothing reads, or a list to which the
  step appends, and the step is never captured.
- *Compare all that has a name in the step's code*, wherever it is. Code writes into the objects that it reads from. By
  names alone, `config.calls += 1` cannot be told from a read of `config.calls`, and `if self.debug and self.calls > 9`
  counts as a read of `calls`, though `debug` is never set.
- *Take the expressions of the code, executed or not.* The same `if` tells why it is executed instructions that count.
- *Guards of dynamo.* It misses attributes of classes and arrays of numpy in silence, guards what the step writes, so
  that it compiles in every call, and cannot trace the hooks, prints and optimizers around which steps are written.
- *Compare replays with eager calls now and then* (`verify` does). It sees all kinds of changes, but after the fact.
- *Have the user declare it.* Who forgets one gets wrong numbers: just what this file is here to prevent.

**How it works.** Two calls of each layout are watched, the one under the preflight and the rehearsal. Python's profile
function tells which functions are called (`calls`), and a trace or `sys.monitoring` which of their instructions are
executed (`executed`). A *place* is a root and a path from it, and `Reads` has all of them. Roots learn their places in
one of two ways:
- A module has many attributes, and code reaches it as `self`. Names are precise enough there: each attribute counts
  whose name an executed instruction of the step has read, or loaded as a text, which `getattr` may be given. What only
  the code of one class reads counts in its modules alone. Of a small dict that code reads whole, or by other keys than
  constants (`self.weights.values()`), each entry counts.
- A global variable, a variable of a function around the step, and an object that a function is given are shared with
  the rest of the program. There the bytecode is read for the longest expressions (`CONFIG.loss["l1"]`), and one of
  them counts if its last instruction was executed (`code`, `roots`).

What a place leads to is looked into, without running code of the user's (`objects`): lists, dicts, slots, partials,
caches. Of functions, code and defaults count. What the watched call has changed itself is left out, unless it was the
only call that did, as where a cache is filled (`OwnChanges`): of a list or dict that grows all that is in it, else the
entry, and in a list the other tensors, which may take turns. Numbers are left out if each call leaves one that was
never there before. Others are compared, also those that code only sets, and replays set them (`left_tensors`). A call
then reads all places by a few getters of C and compares identities (`state/watch.py`). Only where one differs are
values compared (`are_same`).

A place that each of two watched calls leaves with a number that was never there, or longer or shorter than ever, is a
*write* that no replay would do (`Reads.writes`): a counter, a list of losses, a file that is at another position then
(`objects.File`). So is a line that opens a file to write in each of them (`opened_files`). What only the first call
writes is a cache, and other objects and tensors are what a call has made. `step.constants()` lists the places, each
with its value and a line that reads it.

**Where it still fails.**
- What code in C reads or changes is not seen, nor what another thread does.
- Code of torch and of closed packages is given values; what it looks up by itself is not seen.
- A list or an array of more than 64 entries is taken for data, and is not looked into.
- A value that is read only in a call that nobody watches, as behind `if step % 100 == 0`.
- A write to an object that is neither a module nor read under that name, or under a name that is made up, or only in
  some of the calls. Two objects that take turns in an attribute.
- A file that code in C or another thread writes, or that each call leaves at the position where it found it.
- While another profiler is at work, all that the methods of the modules could read counts as read.
"""

import contextlib
import functools
import operator
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._torch.tensors.modes import without_torch_function
from ..._torch.tensors.modules import is_module
from ..._torch.tensors.tensors import is_tensor
from ..._user_line import TORCH, line_text
from .calls import KEPT_ELSEWHERE, CallRecorder, Line, Names, is_looked_into
from .code import Scope, functions_of
from .constants import (
    ABSENT,
    MOST_ENTRIES,
    OWN,
    HostConstant,
    Key,
    OwnChanges,
    Place,
    ReadValues,
    TensorReference,
    around_entries,
    changed_entry,
    constant,
    different,
    getter,
    is_closed,
    is_of_numbers,
    is_plain,
    is_write,
    names_in,
    own_table,
    package_name,
)
from .executed import Executed
from .objects import (
    SET_BY_REPLAYS,
    File,
    HeldTable,
    any_name,
    class_numbers,
    holders,
    noted_function,
    noted_inside,
    users_function,
    users_methods,
)
from .opened_files import seeing_opened_files
from .profiling import seeing_calls
from .roots import Notes, Path, PathKey, Reader, is_left_alone, unreadable

_OPENED = "the file written in "
_KIND = re.compile(f"the variable |the attribute |{_OPENED}")
_ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)")
_A_LINE = re.compile(r":(\d+): `")  # as `line_text` writes it
_file = operator.attrgetter("co_filename")


class _Source(NamedTuple):
    """What the step's code reads by words of its own, and all that is in it."""

    key: Key  # of an attribute the number of its module and its name, of a variable the key of its path
    text: str  # how it is written: `p`, `CONFIG.loss['l1']`, or as much of it as leads to values
    way: list[tuple[Any, Any]]  # the tables that lead to it, each with the key of the next one in it
    value: Any  # `ABSENT` if there is none
    holders: list[HeldTable]  # the tables in the value

    def found(self) -> dict[str, Any]:
        """Return what is noted of the values, by what is written behind the text: numbers, texts and functions
        themselves, a weak reference of a tensor and of an object that is not looked into, and the class of others."""
        with without_torch_function():
            found = {} if self.value is ABSENT else {"": noted_inside(self.value, of_module=len(self.key) == 2)}
            if function := users_function(self.value):
                found["()"] = noted_function(function)
            for holder in self.holders:
                classes = {holder.texts[key]: type(holder.table[key]) for key in holder.inner}
                found = {**classes, **found, **holder.found()}
        return found

    def listed(self) -> Iterator[tuple[str, Any]]:
        """Yield the same for a user: of an object that is looked into only what is in it."""
        found = self.found()
        inside = {text for holder in self.holders for text in holder.found()}
        is_value = not inside or is_plain(self.value)
        return ((text, value) for text, value in found.items() if (text in inside if text else is_value))


class Reading(NamedTuple):
    """One look at all that is compared, and what the next calls look at.

    Attributes:
        readers: functions that read what the values depend on. Each returns a tuple, of the same objects as long as
            nothing has changed. An entry that is gone is `ABSENT` there, or raises a `KeyError` or `IndexError`.
        tables: what may get a further entry that counts: modules and objects, where it may hide an attribute of their
            class, and what is compared with all that is in it.
    """

    values: ReadValues  # what was seen
    readers: list[Callable[[Any], tuple[Any, ...]]]
    read: list[Any]  # the table to pass to each of the readers
    tables: list[Any]
    cells: list[Any]  # those that variables of functions are kept in
    objects: list[Any]  # those whose class counts
    functions: list[FunctionType]  # those whose code and defaults count
    tensors: list[Tensor]  # those that variables and attributes lead to, where `place_of` counts


# The keys of what is noted of the methods of the user's own classes of modules, and of numbers in these.
_METHODS, _NUMBERS = ("methods",), ("numbers",)
_PROFILED = (
    "A profiler runs, as cProfile, and before Python 3.12 there is one at a time. So all that the methods of modules "
    "could read is compared. Let it run from the first replay on, or write into such attributes elsewhere."
)


class Reads:
    """What is compared from call to call, and where it is. A step that is watched shows it.

    Args:
        functions: those of the user's that ampkit calls in a step.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self._functions = tuple(functions)
        self.remark: str = ""  # why more is compared than the step reads, "" if it is not
        self._names, self._own_names = Names(), OwnChanges()  # all names that were read in modules
        self._set: set[str] = set()  # those that were set
        self._read_whole: set[str] = set()  # and those of which all entries count
        self._lines: dict[str, dict[CodeType, Line]] = {}  # where each name is read
        self._paths: dict[PathKey, Path] = {}  # kept, so that no others get their keys
        self._whole: set[PathKey] = set()  # of whose objects each attribute counts
        self._set_alone: set[PathKey] = set()  # of the paths that were read, those that were only set
        self._own = OwnChanges()
        self._readers: dict[PathKey, set[Reader]] = {}  # of the paths that were read
        self._line: dict[PathKey, Line] = {}
        self._problem = ""
        self.may_stop: Callable[[str], bool] = any_name
        self.some_may_stop: bool = False
        self._widened = False
        # What the last step has left another number in, or longer or shorter, with the line.
        self.written: dict[str, Line | None] = {}
        self._follows = False  # whether what a step calls last runs, which may leave the graphs
        self._of_follower: dict[int, CodeType] = {}  # what that has called, by identity: there may be no hash

    @contextlib.contextmanager
    def noting(self, modules: Sequence[nn.Module], in_parts: Callable[[], bool]) -> Iterator[None]:
        """Context for a step, whose code tells what is compared from then on.

        Args:
            modules: those that the step may call.
            in_parts: returns at the end whether only modules are captured. Then what the rest of the step reads is not
                compared.
        """
        self.written = {}
        executed = Executed()
        start = {key: self._follow(path).found() for key, path in self._paths.items()}
        notes = Notes(self._looked_at, self._functions, modules, executed)

        def take(frame: FrameType) -> Sequence[nn.Module] | None:
            if self._follows:
                self._of_follower[id(frame.f_code)] = frame.f_code
            return notes.take(frame)

        recorder = CallRecorder(modules, executed, take)
        with executed.noting():
            with seeing_opened_files(self._note_opened), seeing_calls(recorder.on_call) as has_seen_all:
                yield
                observed = has_seen_all()
                self.remark = "" if observed else _PROFILED
            try:
                self._learn_paths(notes, start, in_parts())
            except Exception as error:  # of a class of the user's; it must not end the step
                notes.problem = notes.problem or unreadable(error)
            self._problem = notes.problem
            self._learn_names(recorder, recorder.names(observed))  # last: the paths were followed with the old names

    @contextlib.contextmanager
    def noting_follower(self) -> Iterator[None]:
        """Context for what a step calls last, and may be called behind its graphs, see `may_be_of_follower`."""
        self._follows = True
        try:
            yield
        finally:
            self._follows = False

    def may_be_of_follower(self, problem: str) -> bool:
        """Return whether what keeps a step from being captured may lie in what it calls last.

        That is so unless the problem names lines, and none of what that has called in the steps that were watched. It
        is not so where that reads `.grad`: behind a graph there are no gradients.
        """
        codes = self._of_follower.values()
        if any(map(_reads_gradients, codes)):
            return False
        if not codes or not _A_LINE.search(problem):
            return True
        found = {file: set(re.findall(re.escape(file) + _A_LINE.pattern, problem)) for file in {*map(_file, codes)}}
        return any(str(line) in found[_file(code)] for code in codes for *_, line in code.co_lines())

    def loads(self, name: str) -> bool:
        """Return whether code of steps reads attributes of this name."""
        return self._names.has_somewhere(name)

    def places_and_values(self) -> tuple[list[tuple[Any, Any]], list[tuple[str, Any]]]:
        """Return where the variables are that code of steps reads or sets, see `LeftTensors`; and what they lead to."""
        places, values = list[tuple[Any, Any]](), list[tuple[str, Any]]()
        for path in self._paths.values():
            if path.root.scope is not Scope.ARGUMENT:
                places.append((path.root.owner, "" if path.root.scope is Scope.ENCLOSING else path.root.name))
            steps = zip(path.parts, path.steps(), strict=False)
            places += [(table, part.key) for part, (table, _) in steps if isinstance(table, dict)]
            values += [(str(path._replace(parts=path.parts[:i])), value) for i, value in enumerate(path.values())]
        return places, values

    def left_out(self) -> dict[str, bool]:
        """Return the names under which nothing is compared, because calls change what is there, and it may not stop.

        With each name, whether code reads attributes of that name.
        """
        places = (*self._own.places, *self._own_names.places)
        found = (names_in(f"{self._paths.get(key or (), '')}{text}")[-1:] for key, text in places)
        return {name: self.loads(name) for name in chain.from_iterable(found) if not self.may_stop(name)}

    def let_stop(self, may_stop: Callable[[str], bool], *, some: bool) -> None:
        """Take note of what of the host a replay may leave as it is, by its name; and whether that is anything."""
        self.may_stop, self.some_may_stop = may_stop, some

    def take_widened(self) -> bool:
        """Return whether something that was compared is left out since the last step; then forget it."""
        widened, self._widened = self._widened, False
        return widened

    def _is_set_by_replays(self, path: Path, text: str) -> bool:
        """Return whether replays set what is written like this, behind what a path leads to."""
        source = self._follow(path, any_name)
        if text:
            found = (holder.table for holder in source.holders if text in holder.texts.values())
            return isinstance(next(found, None), SET_BY_REPLAYS)
        tables = [table for table, _ in path.steps()]
        return isinstance(tables[-1], SET_BY_REPLAYS) if tables else path.root.scope is not Scope.ARGUMENT

    def take_problem(self) -> str:
        """Return why it could not be told what the last step read, "" if it could; then forget it."""
        problem, self._problem = self._problem, ""
        return problem

    def writes(self, before: Set[str]) -> list[str]:
        """Return what the last step has left another number in, or longer or shorter, or written, each with a line.

        Only what is in `before` too, as what an earlier step has, and what does not stop by its name counts.
        """
        found = ((name, line) for name, line in self.written.items() if name in before)
        counts = ((name, line) for name, line in found if not self.may_stop(_KIND.sub("", name, count=1)))
        return [f"{line_text(*line)} - {name}" if line else name for name, line in counts]

    def _looked_at(self, path: Path) -> tuple[dict[str, Any], dict[str, File]]:
        source = self._follow(path, any_name)
        files = [holder for holder in source.holders if isinstance(holder.table, File)]
        return source.found(), {source.text + holder.path: holder.table for holder in files}

    def _note_opened(self, line: Line) -> None:
        self.written[f"{_OPENED}{os.path.basename(line[0])}:{line[1]}"] = line

    def _learn_names(self, recorder: "CallRecorder", read: Names) -> None:
        self._read_whole |= recorder.whole
        looked, changed = recorder.before, set[Place]()
        compared, compared_set = self._compared_names(), self._compared_set()
        changes = (change for before in looked for change in before.changes())
        for place, name, entry, around, was, now, is_set in changes:
            if is_write(was, now):
                if not self._own_names.is_new(place, was, now) and is_set and not self.may_stop(name):
                    continue
                # Code that is not watched may read it.
                lines = recorder.lines.get(name) or recorder.lines.get(around, {})
                if around not in KEPT_ELSEWHERE:
                    self.written[f"the attribute {name}"] = next(iter(lines.values()), None)
            # A dict of which not all entries count is looked at by the names of those that do.
            is_entry = entry and (around_entries(entry) in (name, *self._read_whole))
            changed |= changed_entry(None, entry) if is_entry else {(None, name)}

        def is_read(place: Place) -> bool:
            name = around_entries(place[1])
            return read.has_somewhere(name) or name in recorder.set

        def is_compared(place: Place) -> bool:
            name = around_entries(place[1])
            return compared.has_somewhere(name) or name in compared_set

        def holds(place: Place, test: Callable[[Any], bool]) -> bool:
            return is_read(place) and any(test(each) for before in looked for each in before.values(place[1]))

        self._widened |= self._own_names.saw(
            changed,
            is_read=is_read,
            is_tensor=lambda place: holds(place, is_tensor),
            is_number=lambda place: holds(place, is_of_numbers),
            is_compared=is_compared,
        )
        of_class = dict(self._names.of_class)
        for kind, found in read.of_class.items():
            of_class[kind] = found | of_class.get(kind, frozenset())
        self._names = Names(self._names.of_all | read.of_all, of_class)
        self._set |= recorder.set
        for name, lines in recorder.lines.items():
            self._lines.setdefault(name, {}).update(lines)

    def _learn_paths(self, notes: Notes, start: dict[Key, dict[str, Any]], in_parts: bool) -> None:
        after = {key: self._follow(path, any_name).found() for key, path in notes.paths.items()}
        read = notes.read()
        if in_parts:
            read = {key: line for key, line in read.items() if Reader.MODULE in notes.readers[key]}
        paths = {**self._paths, **notes.paths}
        again = self._note_written(notes, after, read)

        def changed(before: dict[Key, dict[str, Any]], after: dict[Key, dict[str, Any]]) -> set[Place]:
            """Return what counts as changed: of a list or dict that has another length, all that is in it."""
            found = set[Place]()
            for key, text in different(before, after):
                around = around_entries(text)
                is_inside = around or any(issubclass(type(value), (dict, list)) for value in paths[key].values()[-1:])
                is_entry = is_inside and text.endswith("]")
                if (key, text) in again:
                    continue
                if is_entry and all(text in each.get(key, {}) for each in (before, after)):
                    found |= changed_entry(key, text)
                else:
                    found.add((key, around if is_entry else text))
            return found

        # A function may read what another one has written before it was called: then only a later call shows that.
        rewritten = changed(notes.before, after)
        compared = self._compared_paths()
        now = {key: self._follow(path).found() for key, path in self._paths.items()}
        self._widened |= self._own.saw(
            rewritten | changed(start, now),
            is_read=lambda place: place[0] in read,
            is_tensor=lambda place: isinstance(after.get(place[0] or (), {}).get(place[1]), weakref.ref),
            is_number=lambda place: holds_numbers(after.get(place[0] or (), {}), place[1]),
            is_compared=lambda place: place in rewritten and place[0] in compared,
        )
        self._whole |= notes.whole
        set_alone = notes.set_alone()
        self._set_alone = (self._set_alone - read.keys()) | {
            key for key in set_alone if key not in self._readers or key in self._set_alone
        }
        for key, line in read.items():
            self._readers[key] = self._readers.get(key, set()) | notes.readers[key]
            self._line.setdefault(key, line)
        kept = self._readers.keys() | {key for key, _ in self._own.places}
        self._paths = {key: path for key, path in paths.items() if key in kept}

    def _note_written(self, notes: Notes, after: dict[Key, dict[str, Any]], read: dict[PathKey, Line]) -> set[Place]:
        """Take note of the variables that the step has left another number in, or longer or shorter.

        Return the places that are none of these: they have numbers that earlier calls left there, too, and replays set.
        """
        again = set[Place]()
        for key, text in different(notes.before, after):
            was, becomes = (found[key].get(text, ABSENT) for found in (notes.before, after))
            grows = text.endswith("]") and ABSENT in (was, becomes)
            if key in read and (grows or (is_write(was, becomes) and not text.endswith(".keys()"))):
                name = f"{notes.paths[key]}{around_entries(text) if grows else text}"
                is_new = grows or self._own.is_new((key, text), was, becomes) or self.may_stop(name)
                if not is_new and self._is_set_by_replays(notes.paths[key], text):
                    again.add((key, text))
                else:
                    self.written[f"the variable {name}"] = read[key]
        self.written |= {f"the variable {text}": line for text, line in notes.grown().items()}
        return again

    def forget(self) -> None:
        """Compare no variables any more. What names count in modules is known for good."""
        self._paths, self._readers, self._line, self._whole, self._own = {}, {}, {}, set(), OwnChanges()

    def are_of_optimizers(self, old: ReadValues, new: ReadValues) -> bool:
        """Return whether steps of optimizers read all that has changed, and nothing else does."""
        readers = [self._readers.get(key, set()) for key, _ in old.different(new) if len(key) == 3]
        return bool(readers) and all(found == {Reader.OPTIMIZER} for found in readers)

    def modules(self) -> list[nn.Module]:
        """Return the modules that variables lead to."""
        values = (path.values() for path in self._compared_paths().values())
        return [value for found in values for value in found[-1:] if is_module(value)]

    def look(self, modules: Sequence[nn.Module], paths: Callable[[], list[str]]) -> Reading:
        """Look at everything. `paths` returns the path of each of the step's modules."""
        names, compared, is_set = self._compared_names(), self._compared_paths(), self._compared_set().__contains__
        own = OwnChanges(self._own.places | self._own_names.places)
        variables = [self._follow(path, is_set=is_set) for path in compared.values()]
        sources = [*self._attributes(modules, names, is_set), *variables]
        found = {source.key: source.found() for source in sources}
        texts, kinds = {source.key: source.text for source in variables}, list(map(type, modules))
        is_read, paths = self._names.has_somewhere, functools.cache(paths)

        def name(key: Key) -> str:
            if key in (_METHODS, _NUMBERS):
                return "the method " if key == _METHODS else "the attribute "
            return f"the variable {texts[key]}" if key in texts else f"the attribute {paths()[key[0]]}.{key[1]}"

        def was_looked_at(key: Key, text: str) -> bool:
            if key in (_METHODS, _NUMBERS):
                return False
            if len(key) != 2:
                return key in found and all(is_read(name) or is_set(name) for name in _ATTRIBUTE.findall(text))
            is_there = key[0] < len(kinds) and (names.has(kinds[key[0]], key[1]) or is_set(key[1]))
            return is_there and all(names.has_somewhere(name) or is_set(name) for name in names_in(text))

        methods = list(users_methods(kinds))
        found[_METHODS] = {text: noted_function(function) for _, _, text, function in methods}
        numbers = list(class_numbers(kinds, lambda name: is_read(name) or is_set(name)))
        found[_NUMBERS] = {text: number for _, _, text, number in numbers}
        of_classes = [(table, key) for table, key, *_ in (*methods, *numbers)]
        tables = [*map(vars, filter(is_looked_into, modules))] if names.of_all else []
        values = ReadValues(found, name, was_looked_at, own)
        functions = [function for *_, function in methods]
        return _reading(values, sources, list(compared.values()), of_classes, functions, tables)

    def constants(self, modules: Sequence[nn.Module], paths: Sequence[str]) -> Iterator[HostConstant]:
        """Yield the values that steps have read, as they are now. `paths` are those of the modules."""
        own = {name for _, name in self._own_names.places}
        names = self._names.without(KEPT_ELSEWHERE)
        for source in self._attributes(modules, names, frozenset().__contains__, all_modules=True):
            number, name = source.key
            module = modules[number]
            methods = {function.__code__ for _, function in functions_of(type(module))}
            for text, value in source.listed():
                read = names_in(name + text)
                lines = next((found for each in reversed(read) if (found := self._lines.get(each))), {})
                line = next((line for code, line in lines.items() if code in methods), next(iter(lines.values()), None))
                is_own = not own.isdisjoint(read) or self._own_names.leaves_out((source.key, text), value)
                why = OWN if is_own else ""
                if not is_looked_into(module):
                    why = f"{type(module).__name__} changes its attributes between steps"
                yield constant(f"{paths[number]}.{name}{text}", value, line, why)
        for path in (self._paths[key] for key in self._readers):
            source = self._follow(path)
            line, ends_here = self._line[path.key], len(path.values()) <= len(path.parts)
            # Attributes of these are looked at by themselves, or never change.
            is_read_elsewhere = issubclass(type(source.value), (nn.Module, ModuleType, type))
            if ends_here and is_closed(source.value) and not is_read_elsewhere:
                package = package_name(type(source.value))
                yield constant(str(path), ABSENT, line, f"objects of {package} are not looked into")
                continue
            for text, value in source.listed():
                why = OWN if self._own.leaves_out((path.key, text), value) else ""
                yield constant(source.text + text, value, line, why)

    def _compared_names(self) -> Names:
        return self._names.without(KEPT_ELSEWHERE | {name for _, name in self._own_names.places})

    def _compared_set(self) -> Set[str]:
        found = self._set - KEPT_ELSEWHERE - {name for _, name in self._own_names.places}
        return {name for name in found if not self.may_stop(name)}

    def _compared_paths(self) -> dict[PathKey, Path]:
        own = self._own.places
        stopping = {key for key in self._set_alone & self._paths.keys() if self.may_stop(str(self._paths[key]))}
        left_out = stopping | {key for key, text in own if not text}
        return {key: path for key, path in self._paths.items() if key in self._readers and key not in left_out}

    def _attributes(
        self,
        modules: Sequence[nn.Module],
        names: Names,
        is_set: Callable[[str], bool],
        *,
        all_modules: bool = False,
    ) -> Iterator[_Source]:
        """Yield the attributes that code reads. Of those that it only sets, numbers count."""
        seen: set[int] = set()
        counting = {kind: names.of(kind) for kind in set(map(type, modules))}
        for number, module in enumerate(modules):
            table = vars(module)
            if not (all_modules or is_looked_into(module)):
                continue
            of_class = counting[type(module)]
            for name in [name for name in table if name in of_class or (is_set(name) and is_of_numbers(table[name]))]:
                is_whole = self._read_whole.__contains__
                inside = list(
                    holders(table[name], names.has_somewhere, seen, is_set=is_set, is_whole=is_whole, name=name)
                )
                yield _Source((number, name), name, [(table, name)], table[name], inside)

    def _follow(
        self,
        path: Path,
        is_read: Callable[[str], bool] | None = None,
        is_set: Callable[[str], bool] | None = None,
    ) -> _Source:
        """Return what a path leads to; with `is_read`, with what is in objects under names for which that is true.

        Beside that, code may read by other ways than bytecode tells what is in the value: of a small dict each entry.
        With `is_set`, numbers count under names for which that is true, and so they do where code only sets the value.
        """
        way = [(table, part.key) for part, (table, _) in zip(path.parts, path.steps(), strict=False)]
        values = path.values()
        is_set_alone = is_set is not None and path.key in self._set_alone
        if not values or (is_set_alone and not (len(values) > len(path.parts) and is_of_numbers(values[-1]))):
            return _Source(path.key, path.root.name, way, ABSENT, [])
        if path.root.scope is Scope.GLOBAL:
            way.append((path.root.owner, path.root.name))
        value, text = values[-1], str(path._replace(parts=path.parts[: len(values) - 1]))
        kind = next((kind for kind in (dict, list) if issubclass(type(value), kind)), None)
        all_entries = kind is not None and kind.__len__(value) <= MOST_ENTRIES
        is_read = any_name if path.key in self._whole else is_read or self._names.has_somewhere
        inside = holders(value, is_read, set(), is_set=is_set, all_entries=all_entries)
        return _Source(path.key, text, way, value, list(inside))


def _reading(
    values: ReadValues,
    sources: Sequence[_Source],
    paths: Sequence[Path],
    of_classes: Sequence[tuple[Any, Any]],
    methods: Sequence[FunctionType],
    tables: Sequence[Any],
) -> Reading:
    """Return by what the next calls notice that a value may be another one.

    Args:
        values: what was seen.
        sources: what was followed.
        paths: those of the variables among these.
        of_classes: the tables of the user's classes, each with the name of a method or of a number.
        methods: these methods.
        tables: those of modules.
    """
    ways: dict[int, tuple[Any, dict[Any, None]]] = {}
    for table, key in (*chain.from_iterable(source.way for source in sources), *of_classes):
        ways.setdefault(id(table), (table, {}))[1][key] = None
    inside = [holder for source in sources for holder in source.holders]
    on_way = [value for path in paths for value in path.values() if not is_left_alone(value)]
    called = [*(function for source in sources if (function := users_function(source.value))), *methods]
    roots = [path.root for path in paths]
    missing = [root for root in roots if root.scope is Scope.GLOBAL and root.value() is ABSENT]
    readers = [
        *((getter(list(keys), type(table)), table) for table, keys in ways.values()),
        *((read, holder.table) for holder in inside if (read := holder.reader()) is not None),
        *((getter(list(each)), each) for function in called if (each := function.__kwdefaults__)),
        *((_is_there(root.name), root.owner) for root in missing),
    ]
    extensible = [*(holder.table for holder in inside), *tables, *map(own_table, on_way)]
    cells = {id(root.owner): root.owner for root in roots if root.scope is Scope.ENCLOSING}
    tensors = [
        (each(), each.place)
        for key, found in values.found.items()
        for text, each in found.items()
        if isinstance(each, TensorReference) and not values.left_out.leaves_out((key, text), each)
    ]
    return Reading(
        values,
        [read for read, _ in readers],
        [table for _, table in readers],
        list({id(table): table for table in extensible if table is not None}.values()),
        list(cells.values()),
        [*on_way, *(holder.table[key] for holder in inside for key in holder.inner)],
        called,
        [tensor for tensor, place in tensors if tensor is not None and place is not None],
    )


def _reads_gradients(code: CodeType) -> bool:
    """Return whether code reads gradients of parameters. In torch its optimizers do; copies of tensors copy `.grad`."""
    may_read = not code.co_filename.startswith(TORCH) or f"{os.sep}optim{os.sep}" in code.co_filename
    return may_read and "grad" in code.co_names


def holds_numbers(found: dict[str, Any], text: str) -> bool:
    """Return whether there are numbers alone in what is written like this: `found` is noted of values."""
    inside = [value for each, value in found.items() if each.startswith(f"{text}[")]
    inside = inside or [found[each] for each in (text,) if each in found]
    return bool(inside) and all(map(is_of_numbers, inside))


def _is_there(name: str) -> Callable[[dict[str, Any]], tuple[bool]]:
    return lambda table: (name in table,)
