"""What a user writes, made into what the runner runs: the decorators, the task file.

Owns: `@rollout`, `@evaluator`, `load_task` (finding a task file and checking that it is whole), how tasks and harnesses
are found by name. Does not know: models, HTTP, how an episode is run, what the functions may return (returns.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, overload

from minirllm.config import FIELDS, Config, nearest
from minirllm.errors import TaskError, Users
from minirllm.types import AgentConfig, Episode, ModelRequest, Task

TASK_PREFIX = "minirllm_task_"  # modules loaded from a path are registered under this name
DICT_NAMES = ("task_data", "task_info")  # a first parameter so named gets `task.metadata`
LOADING = "{} {} cannot be loaded: "
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
Auxiliary = Callable[[ModelRequest], str | None]
Block = AbstractAsyncContextManager[None]
CHECKOUT = Path(__file__).resolve().parent.parent


class AgentFlow:
    """An agent: ``fn(task, config)``, sync or async. Calling it calls the function.

    `auxiliary` names the kind of a model request that is none of the agent's own (a title, a summary), else None. Such
    calls are answered and shown, and never trained on.
    """

    def __init__(self, fn: Callable[..., Any], name: str, auxiliary: Auxiliary | None = None):
        functools.update_wrapper(self, fn)
        self.fn, self.name, self.is_async, self.auxiliary = fn, name, _is_async(fn), auxiliary
        self.facts: dict[str, Any] = {}  # for the manifest
        self.silent = False  # it never calls the model, and is graded all the same
        # (tasks, the endpoint's URL) -> what rollouts of them begin with; and a block in which those are to come
        self.recipes: Callable[[Sequence[Task], str], list[Any]] = lambda tasks, url: []
        self.ahead: Callable[[Sequence[Task], str], Block] = lambda tasks, url: contextlib.nullcontext()

    def __call__(self, task: Task, config: AgentConfig) -> Any:
        return self.fn(task, config)


class Evaluator:
    """A grader: ``fn(task, episode)``, sync or async. `timeout` (seconds) limits one call, besides the deadline."""

    def __init__(self, fn: Callable[..., Any], name: str, timeout: float | None = None):
        functools.update_wrapper(self, fn)
        self.fn, self.name, self.timeout, self.is_async = fn, name, timeout, _is_async(fn)
        self.takes_dict = _takes_dict(fn)
        self.home: str = fn.__module__  # the module a grader process imports to find this object

    def __call__(self, task: Task, episode: Episode) -> Any:
        return self.fn(task.metadata if self.takes_dict and isinstance(task, Task) else task, episode)


@overload
def rollout(fn: Callable[..., Any], *, name: str | None = None, register: str | None = None) -> AgentFlow: ...
@overload
def rollout(*, name: str | None = None, register: str | None = None) -> Callable[[Callable[..., Any]], AgentFlow]: ...
def rollout(fn: Any = None, *, name: str | None = None, register: str | None = None) -> Any:
    """Make an agent of ``fn(task, config)``, or of an object with ``arun`` or ``run(task, config)``. An object may also
    have ``auxiliary(request)``, see AgentFlow.

    It may return None, a string (the answer), a Trajectory, a list of Trajectory, or an Episode. `register` is accepted
    for rLLM's sake and means the same as `name`.
    """
    if fn is None:
        return functools.partial(rollout, name=name, register=register)
    if isinstance(fn, AgentFlow):
        return fn if name is None else AgentFlow(fn.fn, name, fn.auxiliary)
    method = _callable(fn, ("arun", "run"), "an agent", "run(task, config)")
    return AgentFlow(method, name or register or _name(fn), getattr(fn, "auxiliary", None))


@overload
def evaluator(
    fn: Callable[..., Any], *, name: str | None = None, register: str | None = None, timeout: float | None = None
) -> Evaluator: ...
@overload
def evaluator(
    *, name: str | None = None, register: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], Evaluator]: ...
def evaluator(
    fn: Any = None, *, name: str | None = None, register: str | None = None, timeout: float | None = None
) -> Any:
    """Make a grader of ``fn(task, episode)``, or of an object with ``evaluate(task, episode)``.

    It returns an EvalOutput, a number, a bool, or (number, bool). A number alone is correct from 1.0 up. The first
    parameter gets the task; only when it is annotated ``dict`` or named ``task_data`` or ``task_info`` it gets
    ``task.metadata``. Sync graders run in a child process that is killed at the deadline.
    """
    if fn is None:
        return functools.partial(evaluator, name=name, register=register, timeout=timeout)
    if isinstance(fn, Evaluator):
        return fn if name is None and timeout is None else Evaluator(fn.fn, name or fn.name, timeout or fn.timeout)
    method = _callable(fn, ("evaluate",), "an evaluator", "evaluate(task, episode)")
    return Evaluator(method, name or register or _name(fn), timeout)


def _callable(obj: Any, methods: tuple[str, ...], what: str, signature: str) -> Callable[..., Any]:
    for method in methods:
        if not inspect.isroutine(obj) and not inspect.isclass(obj) and callable(getattr(obj, method, None)):
            return getattr(obj, method)
    if not callable(obj) or inspect.isclass(obj):
        hint = ", an instance and not the class" if inspect.isclass(obj) else ""
        raise TaskError(f"{what.capitalize()} is a function or an object with {signature}{hint}, got {obj!r}.")
    return obj


def _name(obj: Any) -> str:
    return getattr(obj, "__name__", None) or type(obj).__name__


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _takes_dict(fn: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    if first is None:
        raise TaskError(f"Evaluator {_name(fn)!r} takes no arguments; it must take (task, episode).")
    kind = first.annotation
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return first.name in DICT_NAMES or name.partition("[")[0] in ("dict", "Dict", "typing.Dict")


def check_tasks(tasks: Any, where: str) -> list[Task]:
    """`tasks` as a list. Raises TaskError when it is empty, holds something else, or repeats an id."""
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | bytes | dict):
        raise TaskError(f"{where} must give a list of Task, got {type(tasks).__name__}.")
    seen: dict[str, int] = {}
    checked = []
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskError(f"{where} must give Task objects, but item {index} is {type(task).__name__}.")
        if not isinstance(task.id, str) or not task.id or LONE_SURROGATE.search(task.id):
            raise TaskError(f"{where}: item {index} has the id {task.id!r}; an id is a non-empty Unicode string.")
        if task.id in seen:
            raise TaskError(
                f"{where}: items {seen[task.id]} and {index} have the same id {task.id!r}; ids must be unique."
            )
        seen[task.id] = index
        checked.append(task)
    if not checked:
        raise TaskError(f"{where} gave no tasks; there is nothing to run.")
    return checked


@dataclass(frozen=True)
class TaskModule:
    """A whole task: a grader, two sets of problems, and an agent unless a harness is to be one. `defaults` are config
    values below the user's own."""

    name: str
    flow: AgentFlow | None
    evaluator: Evaluator
    make_train: Callable[[Config], Iterable[Task]]
    make_held_out: Callable[[Config], Iterable[Task]] | None
    path: Path | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    data_revision: str = ""
    own_agents: tuple[str, ...] = ()  # names that `harness` may have besides those of programs
    host: Callable[[Config], AgentFlow] | None = None  # who acts, where the task itself runs the harness

    def agent(self) -> AgentFlow:
        """Its own agent. Raises TaskError when it has none."""
        if self.flow is None:
            where = f"Task {self.name}" + (f" ({self.path})" if self.path else "")
            what = "has no function decorated with @rollout; it needs an agent"
            raise TaskError(f"{where} {what}: write one, or choose a harness, as in --harness bash.")
        return self.flow

    def train(self, config: Config) -> list[Task]:
        """The training tasks, checked."""
        return self._made("train", self.make_train, config)

    def held_out(self, config: Config) -> list[Task]:
        """The tasks kept apart for evaluation, checked; none when a trainer was given none."""
        if self.make_held_out is None:
            return []
        return self._made("held_out", self.make_held_out, config)

    def _made(self, which: str, make: Callable[[Config], Iterable[Task]], config: Config) -> list[Task]:
        where = f"{which}(config) of task {self.name}"
        with Users(f"{where}: ", self.path):
            return check_tasks(make(config), where)


def task_of(agent_flow: Any, grader: Any, train: Any, held_out: Any = None) -> TaskModule:
    """A task from its parts. A dataset is an iterable of Task, or a function of Config that gives one."""

    def maker(dataset: Any) -> Callable[[Config], Iterable[Task]]:
        if callable(dataset):
            return dataset
        kept = (
            list(dataset) if isinstance(dataset, Iterable) and not isinstance(dataset, str | bytes | dict) else dataset
        )
        return lambda config: kept

    flow, grader = rollout(_given(agent_flow, "agent")), evaluator(_given(grader, "evaluator"))
    none = held_out is None or (isinstance(held_out, list | tuple) and not held_out)
    return TaskModule(flow.name, flow, grader, maker(train), None if none else maker(held_out))


def _given(part: Any, what: str) -> Any:
    if part is None:
        raise TaskError(f"There is no {what}: give a function, or an object that is one.")
    return part


def load_task(source: str | Path) -> TaskModule:
    """A task from a file path, a folder of Harbor tasks, an installed name, ``package.module`` or ``module:attr``.

    Raises TaskError saying what is missing and where, or the line on which the file failed.
    """
    text = str(source)
    if Path(text).is_dir() and text not in names("tasks"):
        folders: TaskModule = importlib.import_module("minirllm.harbor").load(Path(text))  # by name: it builds on this
        return folders
    if isinstance(source, Path) or text.endswith(".py") or Path(text).is_file():
        module = import_path(Path(text))
        return _task_module(Path(text).stem, vars(module), module)
    module_name, colon, attribute = text.partition(":")
    if not colon and (found := find_name("tasks", text)) is not None:
        return _from_object(text, found)
    if not colon and "." not in text:
        known = names("tasks")
        raise TaskError(
            f"There is no task {text!r}{nearest(text, known)}: give one of {', '.join(known)}, or a path ending in .py."
        )
    found = import_name(text, "Task")
    return _from_object(attribute or module_name.rpartition(".")[2], found)


def names(family: str) -> list[str]:
    """The tasks or harnesses that can be given by name: those shipped, and those that installed packages add."""
    folders = [CHECKOUT / family]
    folders += [Path(p) for p in getattr(_shipped(family), "submodule_search_locations", None) or []]
    files = {p.stem for folder in folders for p in folder.glob("*.py") if not p.stem.startswith("_")}
    return sorted(files | {entry.name for entry in importlib.metadata.entry_points(group=f"minirllm.{family}")})


def find_name(family: str, name: str) -> Any:
    """The module of this name in ``tasks`` or ``harnesses``, or what an installed package adds under it; else None."""
    what = {"tasks": "Task", "harnesses": "Harness"}[family]
    if name.isidentifier() and _shipped(family) and importlib.util.find_spec(f"minirllm.{family}.{name}") is not None:
        with Users(LOADING.format(what, name)):
            return importlib.import_module(f"minirllm.{family}.{name}")
    if name.isidentifier() and (CHECKOUT / family / f"{name}.py").is_file():
        return import_path(CHECKOUT / family / f"{name}.py", what)
    for entry in importlib.metadata.entry_points(group=f"minirllm.{family}", name=name):
        with Users(LOADING.format(what, f"{name} of {entry.value}")):
            return entry.load()
    return None


def import_name(text: str, what: str) -> Any:
    """The module ``package.module``, or its attribute ``package.module:attr``. Raises TaskError; `what` names it."""
    name, colon, attribute = text.partition(":")
    with Users(LOADING.format(what, name)):
        module = importlib.import_module(name)
    if not colon:
        return module
    if not hasattr(module, attribute):
        raise TaskError(f"Module {name} has no {attribute!r}{nearest(attribute, dir(module))}.")
    return getattr(module, attribute)


def import_path(path: Path, what: str = "Task") -> ModuleType:
    """Run the file at `path` as a module. Its folder is importable, so that it can use its neighbours."""
    path = path.resolve()
    if not path.is_file():
        raise TaskError(f"There is no {what.lower()} file {path}.")
    name = f"{TASK_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{what} file {path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    with Users(LOADING.format(what, path), path):
        spec.loader.exec_module(module)
    return module


def _shipped(family: str) -> Any:
    try:
        return importlib.util.find_spec(f"minirllm.{family}")
    except ModuleNotFoundError:
        return None


def _from_object(name: str, obj: Any) -> TaskModule:
    if isinstance(obj, TaskModule):
        return obj
    if isinstance(obj, ModuleType):
        return _task_module(name, vars(obj), obj)
    return _task_module(name, {key: getattr(obj, key) for key in dir(obj) if not key.startswith("__")}, None)


def _task_module(name: str, members: dict[str, Any], module: ModuleType | None) -> TaskModule:
    path = Path(module.__file__) if module is not None and module.__file__ else None
    where = f"Task {name}" + (f" ({path})" if path else "")
    defaults = members.get("DEFAULTS", {})
    if not isinstance(defaults, dict):
        raise TaskError(f"{where}: DEFAULTS must be a dict of config values, got {type(defaults).__name__}.")
    for key in defaults:
        if key not in FIELDS:
            raise TaskError(f"{where}: DEFAULTS has an unknown option {key!r}{nearest(str(key), list(FIELDS))}.")
    flow = _only(AgentFlow, "@rollout", members, where)
    grader = _only(Evaluator, "@evaluator", members, where)
    if grader is None:
        raise TaskError(f"{where} has no function decorated with @evaluator; it needs a grader.")
    grader.home = module.__name__ if module is not None else grader.home
    for function in ("train", "held_out"):
        if not callable(members.get(function)):
            raise TaskError(f"{where} does not define {function}(config); it must return a list of Task.")
    revision = str(members.get("DATA_REVISION", ""))
    return TaskModule(name, flow, grader, members["train"], members["held_out"], path, dict(defaults), revision)


def _only(kind: type, decorator: str, members: dict[str, Any], where: str) -> Any:
    """The one decorated object, or None; of several, the one defined in this module rather than imported into it."""
    found = {id(value): (key, value) for key, value in members.items() if isinstance(value, kind)}
    if len(found) > 1:
        own = {i: pair for i, pair in found.items() if pair[1].__module__ == members.get("__name__")}
        found = own or found
    if len(found) > 1:
        several = ", ".join(key for key, _ in found.values())
        raise TaskError(f"{where} has several functions decorated with {decorator} ({several}); keep one.")
    return next((value for _, value in found.values()), None)
