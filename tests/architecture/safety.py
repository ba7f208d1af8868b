"""Finds what reads data as code, starts a shell, opens a port or is no sandboxed way of doing so, in a source tree.

Names are resolved, not compared as text: imports and aliases in any scope (`from pickle import loads as l`, `import pickle as p`), names
that are given on (`f = pickle.loads`), getattr, importlib and __import__ with a constant. What it cannot resolve where it matters is found,
too. It guards against slips, not against an author who hides: that one may write anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

NOTHING: frozenset[str] = frozenset()
# of these nothing may be used at all, but what is listed: it writes, or is a constant
MODULES = {
    "pickle": frozenset({"dumps", "dump", "HIGHEST_PROTOCOL", "DEFAULT_PROTOCOL", "PickleError", "PicklingError", "UnpicklingError"}),
    **dict.fromkeys(("_pickle", "cPickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "ruamel"), NOTHING),
    **dict.fromkeys(("runpy", "code", "codeop", "imp", "pty", "commands"), NOTHING),
    **dict.fromkeys(("http.server", "socketserver", "xmlrpc", "multiprocessing.managers", "torch.package", "torch.hub"), NOTHING),
}
NAMES = {
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("asyncio.subprocess.create_subprocess_shell", "socket.create_server", "asyncio.start_server", "asyncio.start_unix_server"),
    *("torch.jit.load", "pandas.read_pickle", "numpy.lib.format.read_array"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "importlib.machinery.SourceFileLoader"),
    *("concurrent.futures.ProcessPoolExecutor", "multiprocessing.connection.Listener", "multiprocessing.connection.Client"),
}
PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")
# called on anything: what it belongs to is not known from the text
METHODS = {
    *("bind", "listen", "create_server", "create_unix_server", "start_server", "start_unix_server", "subprocess_shell", "create_subprocess_shell"),
    *("Pipe", "Pool", "Manager", "Listener", "ProcessPoolExecutor"),  # of a context of multiprocessing: these unpickle
    *("recv_object_list", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),  # of torch.distributed
    *("getoutput", "getstatusoutput", "popen", "read_pickle", "exec_module", "load_module", "run_path", "enable_load_extension"),
}
# a keyword that may have this constant only
KEYWORDS = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True, "use_safetensors": True}
# a call of this must give this keyword
REQUIRED = {"torch.load": ("weights_only",)}
BUILTINS = {"eval", "exec", "compile", "__import__"}


def findings(package: Path) -> Iterator[tuple[str, str]]:
    """(path below the package, what) of everything that is not plainly harmless."""
    for path in sorted(package.rglob("*.py")):
        for what in found_in(path.read_text(encoding="utf-8")):
            yield path.relative_to(package).as_posix(), what


def found_in(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    known = _Known(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom() if any(alias.name == "*" for alias in node.names):
                yield f"import of everything in {node.module}"
            case ast.ImportFrom(level=0):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    if alias.name in METHODS or _forbidden(name):
                        yield name
            case ast.Import():
                yield from (alias.name for alias in node.names if _forbidden(alias.name))
            case ast.Call():
                yield from _call(node, known)
            case ast.Constant(value="allow_pickle" | "trust_remote_code"):
                yield f"the text {node.value}"
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call) and id(node) not in inner:
            yield from (what for name in known.names(node) if (what := _forbidden(name)))


def _forbidden(name: str) -> str | None:
    """The name, where it may not be used. Of a module with harmless parts the bare name is harmless."""
    if "(" in name:  # of what a call gave; the call itself is looked at
        return None
    for module, harmless in MODULES.items():
        if name == module and not harmless:
            return name
        if name.startswith(f"{module}.") and name.removeprefix(f"{module}.").partition(".")[0] not in harmless:
            return name
    return name if name in NAMES or name.startswith(PREFIXES) else None


def _call(node: ast.Call, known: _Known) -> Iterator[str]:
    names = known.names(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else None
    if method in METHODS and not any(_forbidden(name) for name in names) and "inspect.signature()" not in known.owners(node.func):
        yield f".{method}()"
    if method == "recv" and not node.args and not node.keywords:
        yield ".recv()"  # a socket's takes a size; this one unpickles
    given = {word.arg: word.value for word in node.keywords}
    for keyword, wanted in KEYWORDS.items():
        if keyword in given and not (isinstance(given[keyword], ast.Constant) and given[keyword].value is wanted):
            yield f"{keyword}={ast.unparse(given[keyword])}"
    if None in given and any(name.partition(".")[0] in ("subprocess", "torch", "numpy", "transformers") and _loads(name) for name in names):
        yield f"{names[0]}(**...)"
    for name in names:
        missing = [keyword for keyword in _required(name) if keyword not in given]
        if missing:
            yield f"{name}() without {', '.join(missing)}"
        if name == "builtins.getattr" and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant):
            yield from (f"getattr({owner}, ...)" for owner in known.names(node.args[0]) if owner in {"os", "subprocess", "builtins", *MODULES})


def _loads(name: str) -> bool:
    return name.startswith("subprocess.") or name.endswith((".load", ".from_pretrained", ".from_config"))


def _required(name: str) -> tuple[str, ...]:
    if name.startswith("transformers.") and name.endswith((".from_pretrained", ".from_config")):
        return ("trust_remote_code", "use_safetensors") if "Model" in name and name.endswith(".from_pretrained") else ("trust_remote_code",)
    return REQUIRED.get(name, ())


class _Known:
    """What the names of a module may stand for: dotted paths, over all its scopes together."""

    def __init__(self, tree: ast.Module) -> None:
        self._meanings: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add(alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else alias.name.partition(".")[0])
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    self._add(alias.asname or alias.name, f"{node.module}.{alias.name}")
        given = [pair for node in ast.walk(tree) for pair in _given_on(node)]
        for _ in range(len(given)):  # a name that is given on and on
            before = sum(map(len, self._meanings.values()))
            for name, value in given:
                for meaning in self.names(value):
                    self._add(name, meaning)
            if before == sum(map(len, self._meanings.values())):
                break

    def names(self, node: ast.expr) -> list[str]:
        """Sorted; empty where it is a value of the program."""
        match node:
            case ast.Name(id=name):
                builtin = {f"builtins.{name}"} if name in (BUILTINS | {"getattr"}) else {"builtins"} if name == "__builtins__" else set()
                return sorted(self._meanings.get(name, set()) | builtin)
            case ast.Attribute(value=owner, attr=name):
                return [f"{path}.{name}" for path in self.names(owner)]
            case ast.Subscript(value=ast.Name(id="__builtins__"), slice=ast.Constant(value=str(name))):
                return [f"builtins.{name}"]
            case ast.Subscript(value=ast.Attribute(value=owner, attr="__dict__"), slice=ast.Constant(value=str(name))):
                return [f"{path}.{name}" for path in self.names(owner)]
            case ast.Call(func=function, args=[owner, ast.Constant(value=str(name)), *_]) if "builtins.getattr" in self.names(function):
                return [f"{path}.{name}" for path in self.names(owner)]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _imports(self.names(function)):
                return [name]
            case ast.Call(func=function):
                return [f"{path}()" for path in self.names(function)]
            case ast.NamedExpr(value=value):
                return self.names(value)
            case ast.IfExp(body=one, orelse=other):
                return sorted({*self.names(one), *self.names(other)})
        return []

    def owners(self, node: ast.expr) -> list[str]:
        return self.names(node.value) if isinstance(node, ast.Attribute) else []

    def _add(self, name: str, meaning: str) -> None:
        if meaning.count("(") < 4 and meaning.count(".") < 12:  # `x = x.next()` would go on for ever
            self._meanings.setdefault(name, set()).add(meaning)


def _imports(names: list[str]) -> bool:
    return bool({"importlib.import_module", "builtins.__import__"} & set(names))


def _given_on(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, what it becomes): plain assignments, parameters with a value, `for` over a literal."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) | ast.NamedExpr(target=ast.Name(id=name), value=value):
            yield name, value
        case ast.arguments():
            named = [*node.posonlyargs, *node.args]
            yield from ((argument.arg, value) for argument, value in zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True))
            yield from ((argument.arg, value) for argument, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value is not None)
        case ast.For(target=target, iter=ast.Tuple(elts=values) | ast.List(elts=values)):
            for value in values:
                yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)
