"""How numba is made to compile every function of the machine once, optimised where it ends up.

This uses what numba does not promise to keep (libraries of code) beside what it documents (pipelines of passes), so
`compiled` takes it only for versions that are known to work with it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from llvmlite import binding
from numba import types
from numba.core import ir
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes
from numba.core.untyped_passes import IRProcessing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numba.core.types import Type

NEEDLESS = frozenset(
    (
        *("WithLifting", "InlineClosureLikes", "MakeFunctionToJitFunction", "InlineInlinables", "InlineOverloads"),
        *("DeadBranchPrune", "RewriteSemanticConstants", "RewriteDynamicRaises", "NopythonRewrites"),
        *("FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass"),
        *("ReconstructSSA", "PreLowerStripPhis", "IRLegalization"),
    )
)
"""Passes of numba for what the machine does not use: closures, exceptions, arrays as a whole, arguments that are
compiled anew for each value, variables of several types (static single assignment), references to be counted."""


class _Library(JITCodeLibrary):
    """Code that is optimised once, as a whole; numba does so function by function, and twice each time.

    More than LLVM's first level of optimisation, vectors or unrolled loops do not make the machine faster.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        options = binding.create_pipeline_tuning_options(speed_level=1)
        options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
        builder = binding.create_pass_builder(self._codegen._tm, options)
        builder.getModulePassManager().run(self._final_module, builder)

    def finalize(self) -> None:
        """Link all that is called, by what is inlined, too, and make machine code of it."""
        called = dict.fromkeys(self._linking_libraries)
        found = list(called)
        for library in found:
            more = [one for one in library._linking_libraries if one not in called] if _is_inlined(library) else []
            called |= dict.fromkeys(more)
            found += dict.fromkeys(more)
        self._linking_libraries = found
        super().finalize()  # type: ignore[no-untyped-call]


class _Inlined(_Library):
    """Code that is only ever inlined: it is linked, optimised and turned to machine code where it ends up."""

    def finalize(self) -> None:
        """Be ready to be linked."""
        for function in self._final_module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        return self._final_module

    def get_pointer_to_function(self, name: str) -> int:
        """Return none."""
        return 0

    @property
    def codegen(self) -> _Inlined:
        """Return what numba calls `set_env` of."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Set what it would need to raise exceptions or to call Python, which it does not."""


def _is_inlined(library: Any) -> bool:
    return isinstance(library, _Inlined)


@register_pass(mutates_CFG=False, analysis_only=False)  # type: ignore[no-untyped-call]
class _OwnLibrary(LoweringPass):
    _name = "own_library"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        library: Any = _Inlined if state.flags.no_cpython_wrapper else _Library
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return True


@register_pass(mutates_CFG=False, analysis_only=False)  # type: ignore[no-untyped-call]
class _OneType(FunctionPass):
    """Lets a variable that begins with a constant of a module have other values, too, as it is not assigned just once:
    the constant goes through a variable of its own."""

    _name = "one_type"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        assign: Any = ir.Assign
        for block in state.func_ir.blocks.values():
            body: list[Any] = []
            for one in block.body:
                if isinstance(one, assign) and isinstance(one.value, ir.Global) and not one.target.is_temp:
                    constant = block.scope.redefine("$constant", one.loc)
                    state.func_ir._definitions[constant.name].append(one.value)
                    body += [assign(one.value, constant, one.loc), assign(constant, one.target, one.loc)]
                else:
                    body.append(one)
            block.body = body
        return True


@contextmanager
def _asked_once() -> Iterator[None]:
    """Let numba look up what a call of its own functions is, with arguments of these types, once.

    The machine adds and compares integers thousands of times, and numba tries all that it knows of each.
    """
    builtin: Any = types.Function
    ask, known = builtin.get_call_type, {}

    def remembered(function: Any, context: Any, args: tuple[Type, ...], kws: dict[str, Type]) -> Any:
        call = function, args, tuple(kws.items())
        if call not in known:
            known[call] = ask(function, context, args, kws)
        return known[call]

    builtin.get_call_type = remembered
    try:
        yield
    finally:
        del builtin.get_call_type


class Pipeline(CompilerBase):
    """How functions of the machine are compiled."""

    def compile_extra(self, function: Any) -> Any:
        """Compile a function, and those that it calls."""
        is_inner = "get_call_type" in vars(types.Function)
        with nullcontext() if is_inner else _asked_once():
            return super().compile_extra(function)  # type: ignore[no-untyped-call]

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes without the needless ones, and with libraries of our own."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        passes.passes = [one for one in passes.passes if one[0].__name__ not in NEEDLESS]
        passes.add_pass_after(_OneType, IRProcessing)
        passes.add_pass_after(_OwnLibrary, AnnotateTypes)
        passes.finalize()
        return [passes]


def once(function: Any) -> Any:
    """Let a function be compiled once, not once for each constant that it is called with; return it."""
    template = function.get_call_template

    def of_any_value(args: tuple[Type, ...], kws: dict[str, Type]) -> Any:
        return template(tuple(map(types.unliteral, args)), kws)

    function.get_call_template = of_any_value
    return function
