"""From functions of the machine to the text of an LLVM module: a small part of Python, with 64-bit integers.

What a function may hold: ints, bools and floats; arrays of ints by their number of axes (`Row`, `Table`, `Cube`), whole
or a part of them by leading indices; named tuples of arrays; assignments, `if`, `while`, `for ... in range(...)`, and
calls of other such functions. It means what it means in Python, but for three things: ints wrap at 64 bits, indices are
neither checked nor counted from the end, and nothing divides by zero. Arrays are contiguous. A name has one type.
"""

from __future__ import annotations

import ast
import inspect
import struct
import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

INT, BOOL, FLOAT = "i64", "i1", "double"
SCALARS = {"int": INT, "bool": BOOL, "float": FLOAT}
AXES = {"Row": 1, "Table": 2, "Cube": 3}
"""Names of arrays, by their axes."""
BINARY = {
    ast.Add: ("add", "fadd"),
    ast.Sub: ("sub", "fsub"),
    ast.Mult: ("mul", "fmul"),
    ast.BitAnd: ("and", ""),
    ast.BitOr: ("or", ""),
    ast.BitXor: ("xor", ""),
    ast.LShift: ("shl", ""),
    ast.RShift: ("ashr", ""),
}
"""Operators: what they are called for ints and for floats."""
COMPARISONS = {
    ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
    ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"),
    ast.Gt: ("sgt", "ogt"),
    ast.GtE: ("sge", "oge"),
}
INTRINSICS = {"sqrt": "llvm.sqrt.f64", "log": "llvm.log.f64"}
"""Functions of `math`."""
FIXED = "!invariant.load !0"
"""Of loads from the tables of named tuples: arrays stay where they are while a function runs."""


class Unsupported(Exception):
    """A function holds what is not translated."""


@dataclass(frozen=True)
class Scalar:
    """A value in a register, or a constant."""

    kind: str
    text: str


@dataclass(frozen=True)
class View:
    """An array, or what leading indices leave of it: where it begins, and its lengths."""

    start: str
    lengths: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """A named tuple of arrays: a table with the address of each and its lengths."""

    name: str
    start: str


Value = Scalar | View | Record
Values = tuple[Value, ...]
"""Of an expression that is a tuple."""


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns: names of types as they are annotated; nothing, one or several scalars."""

    name: str
    takes: tuple[tuple[str, str], ...]
    returns: tuple[str, ...]

    @property
    def result(self) -> str:
        """The result's type in LLVM's words."""
        if len(self.returns) == 1:
            return self.returns[0]
        return "{" + ", ".join(self.returns) + "}" if self.returns else "void"


@dataclass(frozen=True)
class Field:
    """An array of a named tuple: how many axes it has, and the length of the last where that is always the same."""

    name: str
    axes: int
    last: int | None


Records = dict[str, tuple[Field, ...]]
"""By name, the fields of named tuples of arrays."""


@cache
def fields(record: type) -> tuple[Field, ...]:
    """Return the fields of a named tuple; () if they are not all arrays."""
    found = []
    for name, kind in record.__annotations__.items():
        tree = ast.parse(getattr(kind, "__forward_arg__", ""), mode="eval").body if kind else None
        last = None
        if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple):  # Annotated[Table, LENGTH]
            tree, length = tree.slice.elts
            last = int(eval(ast.unparse(length), vars(sys.modules[record.__module__])))
        if not isinstance(tree, ast.Name) or tree.id not in AXES:
            return ()
        found.append(Field(name, AXES[tree.id], last))
    return tuple(found)


def module(functions: Iterable[Callable[..., Any]], entries: Iterable[Callable[..., Any]]) -> str:
    """Return the text of a module with all `functions`; of them `entries` are called from outside.

    An entry gets the address of its arguments, a word each (of an array its address and its lengths, of a named tuple
    the address of a table of such words), and that of as many words for what it returns.
    """
    trees = {function: _tree(function) for function in functions}
    records = _records(trees)
    known = {function: _signature(function, tree, records) for function, tree in trees.items()}
    texts = ["!0 = !{}", *(f"declare {FLOAT} @{name}({FLOAT})" for name in INTRINSICS.values())]
    texts += [_Function(function, tree, known, records).text() for function, tree in trees.items()]
    texts += [_entered(known[function], records) for function in entries]
    return "\n".join(texts)


def outside(function: Callable[..., Any]) -> str:
    """Return the name by which an entry is called from outside the module."""
    return f"entry.{_name(function)}"


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _records(trees: dict[Callable[..., Any], ast.FunctionDef]) -> Records:
    """Return the named tuples that the functions' modules know."""
    found: Records = {}
    for function in trees:
        for name, one in function.__globals__.items():
            if isinstance(one, type) and issubclass(one, tuple) and hasattr(one, "_fields") and fields(one):
                found[name] = fields(one)
    return found


def _signature(function: Callable[..., Any], tree: ast.FunctionDef, records: Records) -> Signature:
    takes = [(one.arg, ast.unparse(one.annotation) if one.annotation else "") for one in tree.args.args]
    for name, kind in takes:
        if kind not in {**SCALARS, **AXES, **records}:
            raise Unsupported(f"{_name(function)}: argument {name} is {kind or 'not annotated'}")
    returns: list[ast.expr] = []
    if isinstance(tree.returns, ast.Subscript) and isinstance(tree.returns.slice, ast.Tuple):
        returns = tree.returns.slice.elts
    elif tree.returns is not None and ast.unparse(tree.returns) != "None":
        returns = [tree.returns]
    return Signature(_name(function), tuple(takes), tuple(SCALARS[ast.unparse(one)] for one in returns))


def _entered(signature: Signature, records: Records) -> str:
    """Return what calls a function with arguments from a table."""
    lines, given, place = [], [], 0
    for name, kind in signature.takes:
        types = ["ptr", *[INT] * AXES[kind]] if kind in AXES else ["ptr" if kind in records else INT]
        for number, one in enumerate(types):
            lines.append(f"%at.{place} = getelementptr {INT}, ptr %in, {INT} {place}")
            lines.append(f"%{name}.{number} = load {one}, ptr %at.{place}")
            place += 1
            given.append(f"{one} %{name}.{number}")
        if kind == "bool":
            lines.append(f"%{name}.bit = icmp ne {INT} %{name}.0, 0")
            given[-1] = f"{BOOL} %{name}.bit"
    call = f"call {signature.result} @{signature.name}({', '.join(given)})"
    lines.append(f"%result = {call}" if signature.returns else call)
    for number, kind in enumerate(signature.returns):
        part = "%result" if len(signature.returns) == 1 else f"%part.{number}"
        if len(signature.returns) > 1:
            lines.append(f"{part} = extractvalue {signature.result} %result, {number}")
        if kind == BOOL:
            lines.append(f"%wide.{number} = zext {BOOL} {part} to {INT}")
            part = f"%wide.{number}"
        lines.append(f"%to.{number} = getelementptr {INT}, ptr %out, {INT} {number}")
        lines.append(f"store {INT} {part}, ptr %to.{number}")
    return "\n".join([f"define void @entry.{signature.name}(ptr %in, ptr %out) {{", *lines, "ret void", "}"])


class _Function:
    """One function on its way into the module."""

    def __init__(
        self,
        function: Callable[..., Any],
        tree: ast.FunctionDef,
        known: dict[Callable[..., Any], Signature],
        records: Records,
    ) -> None:
        self.globals = function.__globals__
        self.tree = tree
        self.known = known
        self.records = records
        self.signature = known[function]
        self.slots: list[str] = []
        """Of the names, before all else: LLVM makes registers of them."""
        self.lines: list[str] = []
        self.names: dict[str, Value] = {}
        """The texts of these values are addresses of slots, but those of records."""
        self.block = "begin"
        self.count = 0
        self.loops: list[tuple[str, str]] = []
        """Where `continue` and `break` go."""

    def text(self) -> str:
        taken = []
        for name, kind in self.signature.takes:
            value = self._argument(name, kind)
            if isinstance(value, Record):
                taken.append(f"ptr noalias readonly {value.start}")
                self.names[name] = value
                continue
            if isinstance(value, View):
                taken += [f"ptr {value.start}", *(f"{INT} {length}" for length in value.lengths)]
            else:
                taken.append(f"{value.kind} {value.text}")
            self._bind(name, value)
        self._run(self.tree.body)
        self.lines.append("unreachable" if self.signature.returns else "ret void")
        head = f"define internal {self.signature.result} @{self.signature.name}({', '.join(taken)}) nounwind {{"
        return "\n".join([head, *self.slots, "br label %begin", "begin:", *self.lines, "}"])

    def _argument(self, name: str, kind: str) -> Value:
        if kind in self.records:
            return Record(kind, f"%{name}.given")
        if kind in AXES:
            return View(f"%{name}.given", tuple(f"%{name}.length.{axis}" for axis in range(AXES[kind])))
        return Scalar(SCALARS[kind], f"%{name}.given")

    # -- lines and blocks

    def _line(self, text: str) -> str:
        """Add what gives a value; return the value's name."""
        self.count += 1
        self.lines.append(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def _label(self) -> str:
        self.count += 1
        return f"b{self.count}"

    def _place(self, label: str) -> None:
        """Go on in the block `label`, where what is before also leads."""
        self.lines.append(f"br label %{label}")
        self._begin(label)

    def _begin(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def _leave(self, text: str) -> None:
        """End a block; what follows is never reached."""
        self.lines.append(text)
        self._begin(self._label())

    def _fork(self, condition: str, then: str, otherwise: str) -> None:
        self.lines.append(f"br i1 {condition}, label %{then}, label %{otherwise}")

    def _slot(self, kind: str) -> str:
        self.count += 1
        self.slots.append(f"%s{self.count} = alloca {kind}")
        return f"%s{self.count}"

    def _store(self, kind: str, text: str, to: str) -> None:
        self.lines.append(f"store {kind} {text}, ptr {to}")

    def _refused(self, node: ast.AST) -> Unsupported:
        return Unsupported(f"{self.signature.name}, line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}")

    # -- statements

    def _run(self, statements: list[ast.stmt]) -> None:
        for one in statements:
            method = getattr(self, f"_do_{type(one).__name__.lower()}", None)
            if method is None:
                raise self._refused(one)
            method(one)

    def _do_pass(self, node: ast.Pass) -> None:
        pass

    def _do_expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._values(node.value)

    def _do_break(self, node: ast.Break) -> None:
        self._leave(f"br label %{self.loops[-1][1]}")

    def _do_continue(self, node: ast.Continue) -> None:
        self._leave(f"br label %{self.loops[-1][0]}")

    def _do_return(self, node: ast.Return) -> None:
        found = () if node.value is None else self._values(node.value)
        kinds, result = self.signature.returns, self.signature.result
        if len(found) != len(kinds):
            raise self._refused(node)
        texts = [self._as(one, kind, node) for one, kind in zip(found, kinds, strict=True)]
        if len(texts) > 1:
            whole = "undef"
            for number, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
                whole = self._line(f"insertvalue {result} {whole}, {kind} {text}, {number}")
            texts = [whole]
        self._leave(f"ret {result} {texts[0]}" if texts else "ret void")

    def _do_if(self, node: ast.If) -> None:
        then, otherwise, after = self._label(), self._label(), self._label()
        self._fork(self._truth(node.test), then, otherwise if node.orelse else after)
        self._begin(then)
        self._run(node.body)
        if node.orelse:
            self.lines.append(f"br label %{after}")
            self._begin(otherwise)
            self._run(node.orelse)
        self._place(after)

    def _do_while(self, node: ast.While) -> None:
        again, body, after = self._label(), self._label(), self._label()
        if node.orelse:
            raise self._refused(node)
        self._place(again)
        self._fork(self._truth(node.test), body, after)
        self._begin(body)
        self.loops.append((again, after))
        self._run(node.body)
        self.loops.pop()
        self.lines.append(f"br label %{again}")
        self._begin(after)

    def _do_for(self, node: ast.For) -> None:
        is_range = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"
        if not is_range or not isinstance(node.target, ast.Name) or node.orelse:
            raise self._refused(node)
        ends = [self._int(one) for one in node.iter.args]  # type: ignore[attr-defined]
        if len(ends) > 2:
            raise self._refused(node)
        first, last = ("0", ends[0]) if len(ends) == 1 else ends
        name = node.target.id
        self._count(first, last, lambda number: self._bind(name, Scalar(INT, number)), node.body)

    def _count(self, first: str, last: str, at: Callable[[str], None], body: list[ast.stmt]) -> None:
        """Call `at` with each number from first to before last, and run the body."""
        counter = self._slot(INT)
        self._store(INT, first, counter)
        again, inside, step, after = (self._label() for _ in range(4))
        self._place(again)
        number = self._line(f"load {INT}, ptr {counter}")
        self._fork(self._line(f"icmp slt {INT} {number}, {last}"), inside, after)
        self._begin(inside)
        at(number)
        self.loops.append((step, after))
        self._run(body)
        self.loops.pop()
        self._place(step)
        self._store(INT, self._line(f"add {INT} {number}, 1"), counter)
        self.lines.append(f"br label %{again}")
        self._begin(after)

    def _do_assign(self, node: ast.Assign) -> None:
        found = self._values(node.value)
        for target in node.targets:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            if len(targets) != len(found):
                raise self._refused(node)
            for one, value in zip(targets, found, strict=True):
                self._set(one, value)

    def _do_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            before = self._value(ast.Name(node.target.id, ast.Load()))
            self._bind(node.target.id, self._combined(node.op, before, self._value(node.value), node))
            return
        where = self._element(node.target)
        value = self._value(node.value)  # before the load: it may write there
        changed = self._combined(node.op, Scalar(INT, self._line(f"load {INT}, ptr {where}")), value, node)
        self._store(INT, self._as(changed, INT, node), where)

    def _set(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, ast.Subscript) and _is_cut(target.slice):
            self._fill(target, value)
        else:
            self._store(INT, self._as(value, INT, target), self._element(target))

    def _bind(self, name: str, value: Value) -> None:
        """Give a name a value; its slots are made the first time."""
        if isinstance(value, Record):
            raise Unsupported(f"{self.signature.name}: {name} is a named tuple")
        slot = self.names.get(name)
        if isinstance(value, View):
            if slot is None:
                slot = View(self._slot("ptr"), tuple(self._slot(INT) for _ in value.lengths))
                self.names[name] = slot
            if not isinstance(slot, View) or len(slot.lengths) != len(value.lengths):
                raise Unsupported(f"{self.signature.name}: {name} has two types")
            self._store("ptr", value.start, slot.start)
            for length, at in zip(value.lengths, slot.lengths, strict=True):
                self._store(INT, length, at)
            return
        if slot is None:
            slot = self.names[name] = Scalar(value.kind, self._slot(value.kind))
        if not isinstance(slot, Scalar):
            raise Unsupported(f"{self.signature.name}: {name} has two types")
        self._store(slot.kind, self._as(value, slot.kind, self.tree), slot.text)

    def _fill(self, target: ast.Subscript, value: Value) -> None:
        """Write one value to the elements of an array from one place of its last axis, or of all, to another."""
        base = self._value(target.value)
        parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        cut = parts[-1]
        if not isinstance(base, View) or not isinstance(cut, ast.Slice) or cut.step:
            raise self._refused(target)
        inner = self._part(base, [self._int(one) for one in parts[:-1]])
        if cut.lower is None and cut.upper is None:
            inner = View(inner.start, (self._size(inner),))
        elif len(inner.lengths) > 1:
            raise self._refused(target)
        first = "0" if cut.lower is None else self._int(cut.lower)
        last = inner.lengths[0] if cut.upper is None else self._int(cut.upper)
        text = self._as(value, INT, target)
        self._count(first, last, lambda at: self._store(INT, text, self._part(inner, [at]).start), [])

    # -- expressions

    def _values(self, node: ast.expr) -> Values:
        if isinstance(node, ast.Tuple):
            return tuple(self._value(one) for one in node.elts)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Subscript) and _is_shape(node.value) and isinstance(node.slice, ast.Slice):
            return tuple(self._shape(node.value)[self._constants(node.slice)])
        return (self._value(node),)

    def _value(self, node: ast.expr) -> Value:
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._refused(node)
        found = method(node)
        if isinstance(found, tuple):
            if len(found) != 1:
                raise self._refused(node)
            found = found[0]
        assert isinstance(found, (Scalar, View, Record))
        return found

    def _scalar(self, node: ast.expr) -> Scalar:
        found = self._value(node)
        if not isinstance(found, Scalar):
            raise self._refused(node)
        return found

    def _int(self, node: ast.expr) -> str:
        return self._as(self._value(node), INT, node)

    def _as(self, value: Value, kind: str, node: ast.AST) -> str:
        """Return a value as one of another kind, where Python would take it for one."""
        if not isinstance(value, Scalar):
            raise self._refused(node)
        if value.kind == kind:
            return value.text
        if value.kind == BOOL and kind == INT:
            return self._line(f"zext {BOOL} {value.text} to {INT}")
        if value.kind == INT and kind == FLOAT:
            return self._line(f"sitofp {INT} {value.text} to {FLOAT}")
        raise self._refused(node)

    def _truth(self, node: ast.expr) -> str:
        """Return whether an expression is true."""
        if isinstance(node, ast.BoolOp):
            return self._joined([partial(self._truth, one) for one in node.values], isinstance(node.op, ast.And))
        found = self._scalar(node)
        if found.kind == FLOAT:
            raise self._refused(node)
        return found.text if found.kind == BOOL else self._line(f"icmp ne {INT} {found.text}, 0")

    def _joined(self, conditions: Sequence[Callable[[], str]], is_and: bool) -> str:
        """Return the conditions' conjunction or disjunction; none is looked at that does not matter."""
        after, known = self._label(), []
        for number, condition in enumerate(conditions):
            found = condition()
            if number + 1 == len(conditions):
                known.append(f"[{found}, %{self.block}]")
                self._place(after)
                break
            known.append(f"[{'false' if is_and else 'true'}, %{self.block}]")
            following = self._label()
            self._fork(found, following if is_and else after, after if is_and else following)
            self._begin(following)
        return self._line(f"phi i1 {', '.join(known)}")

    def _of_constant(self, node: ast.Constant) -> Scalar:
        return self._literal(node.value, node)

    def _literal(self, value: object, node: ast.AST) -> Scalar:
        if isinstance(value, bool):
            return Scalar(BOOL, "true" if value else "false")
        if isinstance(value, int):
            return Scalar(INT, str(int(value)))
        if isinstance(value, float):
            return Scalar(FLOAT, "0x" + struct.pack(">d", value).hex())
        raise self._refused(node)

    def _of_name(self, node: ast.Name) -> Value:
        slot = self.names.get(node.id)
        if isinstance(slot, Record):
            return slot
        if isinstance(slot, Scalar):
            return Scalar(slot.kind, self._line(f"load {slot.kind}, ptr {slot.text}"))
        if isinstance(slot, View):
            start = self._line(f"load ptr, ptr {slot.start}")
            return View(start, tuple(self._line(f"load {INT}, ptr {length}") for length in slot.lengths))
        return self._literal(self.globals.get(node.id), node)

    def _of_attribute(self, node: ast.Attribute) -> Value:
        base = self._value(node.value)
        if isinstance(base, View) and node.attr == "size":
            return Scalar(INT, self._size(base))
        if isinstance(base, View) and node.attr == "flat":
            return View(base.start, (self._size(base),))
        if not isinstance(base, Record):
            raise self._refused(node)
        place = 0
        for field in self.records[base.name]:
            if field.name == node.attr:
                known = field.axes if field.last is None else field.axes - 1
                lengths = [self._fixed(base, place + 1 + axis, INT) for axis in range(known)]
                lengths += [] if field.last is None else [str(field.last)]
                return View(self._fixed(base, place, "ptr"), tuple(lengths))
            place += 1 + field.axes
        raise self._refused(node)

    def _fixed(self, base: Record, place: int, kind: str) -> str:
        where = self._line(f"getelementptr inbounds {INT}, ptr {base.start}, {INT} {place}")
        return self._line(f"load {kind}, ptr {where}, {FIXED}")

    def _shape(self, node: ast.expr) -> list[Scalar]:
        assert isinstance(node, ast.Attribute)
        base = self._value(node.value)
        if not isinstance(base, View):
            raise self._refused(node)
        return [Scalar(INT, length) for length in base.lengths]

    def _constants(self, node: ast.Slice) -> slice:
        ends = [None if one is None else ast.literal_eval(one) for one in (node.lower, node.upper)]
        return slice(*ends)

    def _of_subscript(self, node: ast.Subscript) -> Value:
        if _is_shape(node.value):
            return self._shape(node.value)[int(ast.literal_eval(node.slice))]
        found = self._indexed(node)
        return found if found.lengths else Scalar(INT, self._line(f"load {INT}, ptr {found.start}"))

    def _indexed(self, node: ast.Subscript) -> View:
        base = self._value(node.value)
        if not isinstance(base, View):
            raise self._refused(node)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return self._part(base, [self._int(one) for one in indices])

    def _element(self, node: ast.expr) -> str:
        """Return the address of an element."""
        if not isinstance(node, ast.Subscript):
            raise self._refused(node)
        found = self._indexed(node)
        if found.lengths:
            raise self._refused(node)
        return found.start

    def _part(self, base: View, indices: list[str]) -> View:
        """Return what leading indices leave of an array."""
        offset = ""
        for axis, length in enumerate(base.lengths):
            if offset:
                offset = self._line(f"mul {INT} {offset}, {length}")
            if axis < len(indices):
                offset = self._line(f"add {INT} {offset}, {indices[axis]}") if offset else indices[axis]
        if not offset:
            return base
        start = self._line(f"getelementptr inbounds {INT}, ptr {base.start}, {INT} {offset}")
        return View(start, base.lengths[len(indices) :])

    def _size(self, base: View) -> str:
        size, *others = base.lengths
        for length in others:
            size = self._line(f"mul {INT} {size}, {length}")
        return size

    def _of_boolop(self, node: ast.BoolOp) -> Scalar:
        return Scalar(BOOL, self._truth(node))

    def _of_unaryop(self, node: ast.UnaryOp) -> Scalar:
        if isinstance(node.op, ast.Not):
            return Scalar(BOOL, self._line(f"xor i1 {self._truth(node.operand)}, true"))
        found = self._scalar(node.operand)
        if not isinstance(node.op, ast.USub):
            raise self._refused(node)
        if found.kind == FLOAT:
            return Scalar(FLOAT, self._line(f"fneg {FLOAT} {found.text}"))
        return Scalar(INT, self._line(f"sub {INT} 0, {self._as(found, INT, node)}"))

    def _of_binop(self, node: ast.BinOp) -> Scalar:
        return self._combined(node.op, self._value(node.left), self._value(node.right), node)

    def _combined(self, operator: ast.operator, left: Value, right: Value, node: ast.AST) -> Scalar:
        if not isinstance(left, Scalar) or not isinstance(right, Scalar):
            raise self._refused(node)
        is_float = FLOAT in (left.kind, right.kind) or isinstance(operator, ast.Div)
        kind = FLOAT if is_float else INT
        one, other = self._as(left, kind, node), self._as(right, kind, node)
        if isinstance(operator, ast.Div):
            return Scalar(kind, self._line(f"fdiv {kind} {one}, {other}"))
        if isinstance(operator, (ast.FloorDiv, ast.Mod)) and not is_float:
            return self._divided(one, other)[isinstance(operator, ast.Mod)]
        name = BINARY.get(type(operator), ("", ""))[is_float]
        if not name:
            raise self._refused(node)
        return Scalar(kind, self._line(f"{name} {kind} {one}, {other}"))

    def _divided(self, one: str, other: str) -> tuple[Scalar, Scalar]:
        """Return quotient and rest as Python has them, rounded down; LLVM rounds towards zero."""
        quotient, rest = self._line(f"sdiv {INT} {one}, {other}"), self._line(f"srem {INT} {one}, {other}")
        differ = self._line(f"icmp slt {INT} {self._line(f'xor {INT} {rest}, {other}')}, 0")
        is_off = self._line(f"and i1 {differ}, {self._line(f'icmp ne {INT} {rest}, 0')}")
        less = self._line(f"sub {INT} {quotient}, {self._line(f'zext i1 {is_off} to {INT}')}")
        more = self._line(f"add {INT} {rest}, {self._line(f'select i1 {is_off}, {INT} {other}, {INT} 0')}")
        return Scalar(INT, less), Scalar(INT, more)

    def _of_compare(self, node: ast.Compare) -> Scalar:
        left = [self._scalar(node.left)]

        def is_one_of(one: ast.expr) -> str:
            return self._order(ast.Eq(), left[0], self._scalar(one), node)

        def compared(operator: ast.cmpop, right: ast.expr) -> str:
            if isinstance(operator, ast.In) and isinstance(right, ast.Tuple):
                same = [partial(is_one_of, one) for one in right.elts]
                return self._joined(same, is_and=False)
            before, left[0] = left[0], self._scalar(right)
            return self._order(operator, before, left[0], node)

        each = [partial(compared, *pair) for pair in zip(node.ops, node.comparators, strict=True)]
        return Scalar(BOOL, each[0]() if len(each) == 1 else self._joined(each, is_and=True))

    def _order(self, operator: ast.cmpop, left: Scalar, right: Scalar, node: ast.AST) -> str:
        if type(operator) not in COMPARISONS:
            raise self._refused(node)
        of_ints, of_floats = COMPARISONS[type(operator)]
        if FLOAT in (left.kind, right.kind):
            one, other = self._as(left, FLOAT, node), self._as(right, FLOAT, node)
            return self._line(f"fcmp {of_floats} {FLOAT} {one}, {other}")
        return self._line(f"icmp {of_ints} {INT} {self._as(left, INT, node)}, {self._as(right, INT, node)}")

    def _of_ifexp(self, node: ast.IfExp) -> Scalar:
        then, otherwise, after = self._label(), self._label(), self._label()
        self._fork(self._truth(node.test), then, otherwise)
        self._begin(then)
        one, place = self._scalar(node.body), len(self.lines)
        block = self.block
        self._begin(otherwise)
        other = self._scalar(node.orelse)
        kind = one.kind if one.kind == other.kind else FLOAT if FLOAT in (one.kind, other.kind) else INT
        right = self._as(other, kind, node)
        last = self.block
        self.lines.append(f"br label %{after}")
        rest, self.lines = self.lines[place:], self.lines[:place]
        left = self._as(one, kind, node)  # at the end of the first block, now that the kind is known
        self.lines += [f"br label %{after}", *rest]
        self._begin(after)
        return Scalar(kind, self._line(f"phi {kind} [{left}, %{block}], [{right}, %{last}]"))

    # -- calls

    def _of_call(self, node: ast.Call) -> Values:
        if node.keywords:
            raise self._refused(node)
        name = ast.unparse(node.func)
        if name in ("max", "min") and len(node.args) > 1:
            return (self._extreme(name, [self._scalar(one) for one in node.args], node),)
        if name == "divmod":
            one, other = map(self._int, node.args)
            return self._divided(one, other)
        if name == "bool":
            return (Scalar(BOOL, self._truth(node.args[0])),)
        if name == "int":
            found = self._scalar(node.args[0])
            if found.kind == FLOAT:
                return (Scalar(INT, self._line(f"fptosi {FLOAT} {found.text} to {INT}")),)
            return (Scalar(INT, self._as(found, INT, node)),)
        if name.startswith("math.") and name.removeprefix("math.") in INTRINSICS:
            given = self._as(self._scalar(node.args[0]), FLOAT, node)
            return (Scalar(FLOAT, self._line(f"call {FLOAT} @{INTRINSICS[name[5:]]}({FLOAT} {given})")),)
        function = self.globals.get(name)
        called = self.known.get(getattr(function, "function", function))  # type: ignore[arg-type]
        if called is None:
            raise self._refused(node)
        return self._called(called, node)

    def _extreme(self, name: str, values: list[Scalar], node: ast.AST) -> Scalar:
        best = self._as(values[0], INT, node)
        for value in values[1:]:
            other = self._as(value, INT, node)
            is_best = self._line(f"icmp {'sge' if name == 'max' else 'sle'} {INT} {best}, {other}")
            best = self._line(f"select i1 {is_best}, {INT} {best}, {INT} {other}")
        return Scalar(INT, best)

    def _called(self, called: Signature, node: ast.Call) -> Values:
        given: list[str] = []
        if len(node.args) != len(called.takes):
            raise self._refused(node)
        for argument, (_, kind) in zip(node.args, called.takes, strict=True):
            value = self._value(argument)
            if isinstance(value, Record) and value.name == kind:
                given.append(f"ptr {value.start}")
            elif isinstance(value, View) and len(value.lengths) == AXES.get(kind):
                given += [f"ptr {value.start}", *(f"{INT} {length}" for length in value.lengths)]
            elif kind in SCALARS:
                given.append(f"{SCALARS[kind]} {self._as(value, SCALARS[kind], node)}")
            else:
                raise self._refused(node)
        call = f"call {called.result} @{called.name}({', '.join(given)})"
        if not called.returns:
            self.lines.append(call)
            return ()
        result = self._line(call)
        if len(called.returns) == 1:
            return (Scalar(called.returns[0], result),)
        return tuple(
            Scalar(kind, self._line(f"extractvalue {called.result} {result}, {number}"))
            for number, kind in enumerate(called.returns)
        )


def _is_cut(node: ast.expr) -> bool:
    return isinstance(node.elts[-1] if isinstance(node, ast.Tuple) else node, ast.Slice)


def _is_shape(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "shape"
