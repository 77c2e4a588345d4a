"""Compiling Triton kernels without a GPU. Imports triton, so only processes that do not interpret may import this."""

from collections.abc import Mapping, Sequence

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction


def ptx(
    kernel: JITFunction,
    capability: int,
    types: Mapping[str, str | tuple[str, ...]],
    constants: Mapping[str, object],
    aligned: Sequence[str | tuple[str, int]],
) -> str:
    """The code of ``kernel`` for a CUDA device of this capability.

    Args:
        types: of the arguments, such as "*bf16" or "i32", or a tuple of these; constants: the tl.constexpr arguments.
        aligned: arguments, or elements of a tuple, known to be multiples of 16.
    """
    signature = {**types, **{name: "constexpr" for name in constants}}
    paths = [(name,) if isinstance(name, str) else name for name in aligned]
    attrs = {(list(signature).index(name), *inside): [["tt.divisibility", 16]] for name, *inside in paths}
    source = ASTSource(kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    return compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
