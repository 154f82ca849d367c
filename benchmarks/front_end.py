"""Triton's front end alone: what it makes of a launch, for a GPU that need not be there.

From a kernel's source to its intermediate code (TTIR) nothing asks for a GPU, nor for the sizes of its memory. What is
named here is private to Triton's JIT: a release that names it otherwise fails here.
"""

import ast
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.utils._pytree import tree_leaves
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.compiler.code_generator import CodeGenerator, ast_to_ttir
from triton.compiler.compiler import make_backend
from triton.runtime import jit

from dsf.kernels.triton.launch import Pointer
from dsf.kernels.triton.schedule import Ref, mapped

TARGET = GPUTarget("cuda", 90, 32)


class Asked(NamedTuple):
    """A launch as Triton compiles it: by the kinds of its arguments, whose values are `bound`."""

    kernel: Any
    bound: dict[str, Any]
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def key(self):
        """What tells compiled kernels apart."""
        kernel, constants = self.kernel.fn, self.constants
        about = f"{kernel.__module__}.{kernel.__name__} {self.signature} {self.attributes} {self.options}"
        about += str({place: x.fn.__name__ if hasattr(x, "fn") else x for place, x in constants.items()})
        functions = [x.cache_key for x in tree_leaves(tuple(constants.values())) if hasattr(x, "cache_key")]
        return about, *functions


@cache
def parsed(source):
    """What Triton parses at every call of a function; nothing changes it."""
    return ast.parse(source)


class Function(NamedTuple):
    """A function that was translated: what it returns, and the names of all that it is made of, its own too."""

    returns: Any
    made_of: frozenset[str]


def functions_among(types):
    """The functions among the constants that a function is translated for."""
    for x in types:
        yield from functions_among(getattr(x, "types", ()))
        if hasattr(getattr(x, "value", None), "cache_key"):
            yield x.value


class FrontEnd:
    """Of the installed Triton."""

    def __init__(self, target=TARGET):
        self.target, self.backend = target, make_backend(target)
        self.translated = {}  # functions by what Triton translates them for

    def asked(self, kernel, args, named):
        """kernel[grid](*args, **named). Tensors may be anything that has `dtype` and `data_ptr`."""
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, found, _ = binder(*args, **named, debug=False, instrumentation_mode="")
        options = self.backend.parse_options(named | {"debug": False, "instrumentation_mode": ""})
        kinds = [kind for kind, _ in found]
        signature = {x.name: kind for x, kind in zip(kernel.params, kinds, strict=True)}
        unknown = named.keys() - signature.keys() - vars(options).keys()
        if unknown:
            raise KeyError(f"{kernel.__name__} is launched with options that Triton has not: {sorted(unknown)}")
        values, said = list(bound.values()), ["" if kind == "constexpr" else x for kind, x in found]
        constants = find_paths_if(kinds, lambda _, kind: kind == "constexpr")
        attributes = find_paths_if(said, lambda _, x: isinstance(x, str))
        constants = {path: get_iterable_path(values, path) for path in constants}
        attributes = {path: self.backend.parse_attr(get_iterable_path(said, path)) for path in attributes}
        return Asked(kernel, bound, signature, constants, attributes, options)

    def of(self, launch):
        """A launch of a schedule."""
        args = mapped(lambda x: Pointer(x) if isinstance(x, Ref) else x, launch.args)
        return self.asked(launch.kernel, args, launch.named)

    def code(self, asked):
        """The kernel's code as it is written, every function that it calls by its name; raises what users would see."""
        from triton._C.libtriton import ir

        context, backend, options = ir.context(), self.backend, asked.options
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = ASTSource(asked.kernel, asked.signature, asked.constants, asked.attributes)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        with patch.object(jit.JITFunction, "parse", lambda function: parsed(function.src)):
            found = ast_to_ttir(
                asked.kernel, source, context=context, options=options, codegen_fns=functions, module_map=modules
            )
        if not found.verify():  # later releases than 3.4 have seen to that
            raise RuntimeError("the intermediate code is not valid")
        return found

    def functions(self, asked):
        """The names of the functions that a kernel is made of, each of which is translated once for all kernels.

        Raises what users would see. Later kernels find a function declared: what calls of it need is its type.
        """
        visit, inside, here = CodeGenerator.visit_FunctionDef, [set()], {}

        class Returned(dict):
            """What functions of the kernel return, which Triton reads where it calls one again."""

            def __getitem__(self, name):
                inside[-1].update(here[name])
                return super().__getitem__(name)

        def once(generator, node):
            if generator.is_kernel:
                generator.function_ret_types = Returned()
                return visit(generator, node)
            called, given = generator.jit_fn, generator.prototype
            key = (generator.function_name, called.cache_key, generator.noinline, str(asked.options))
            key += tuple(x.cache_key for x in functions_among(given.arg_types))
            if key not in self.translated:
                inside.append({f"{called.__module__}.{called.__qualname__}"})
                visit(generator, node)
                self.translated[key] = Function(generator.ret_type, frozenset(inside.pop()))
            else:
                builder, known = generator.builder, self.translated[key].returns
                generator.ret_type, given.ret_types = known, list(getattr(known, "types", [known]))
                generator.fn = builder.get_or_insert_function(
                    generator.module, generator.function_name, given.serialize(builder), "private", generator.noinline
                )
                generator.module.push_back(generator.fn)
            here[generator.function_name] = self.translated[key].made_of
            inside[-1].update(here[generator.function_name])

        with patch.object(CodeGenerator, "visit_FunctionDef", once):
            self.code(asked)
        return inside[0]

    def inlined(self, asked):
        """The code with all that it calls inlined, without what tells where it stood."""
        return self._stages(asked, "ttir").str_nodebug()

    def laid_out(self, asked):
        """The code as it is laid out on a GPU's threads (TTGIR); raises where Triton's passes fail."""
        return self._stages(asked, "ttir", "ttgir")

    def compiled(self, asked):
        """The kernel with its machine code; ptxas takes most of the time."""
        source = ASTSource(asked.kernel, asked.signature, asked.constants, asked.attributes)
        options = {k: v for k, v in vars(asked.options).items() if k in ("num_warps", "num_stages", "maxnreg")}
        return compile_source(source, target=self.target, options=options)

    def _stages(self, asked, *names):
        made, stages, told = self.code(asked), {}, {}
        self.backend.add_stages(stages, asked.options, Language.TRITON)
        for name in names:
            made = stages[name](made, told)
        return made
