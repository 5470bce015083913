"""A weight that answers matrix products with a recipe's numerics, whatever model code asks for them.

Model code of transformers multiplies by a weight in four ways: `F.linear(x, w)`, `F.grouped_mm(x, w, offs)`,
`x @ w` and `torch.bmm(x, w)`, after at most an index (`w[expert]`) and a transpose. `OperandWeight` is a Tensor
whose value is Q(W); it follows index and transpose and hands the product to its `Product`. So no model family needs
code of its own. Any other operation that would give a tensor is refused: it would silently skip the activations.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quads.compute import as_written, product_input


class Product(Protocol):
    """Multiplies activations [M, K] by one weight [N, K], or rows sorted by expert by [experts, N, K]."""

    def expert(self, index: int) -> Product: ...

    def matmul(self, x: Tensor) -> Tensor: ...

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        """`ends` (int32, [experts]): the row where each expert's rows end."""
        ...


class OperandWeight(Tensor):
    """Q(W) as a tensor ([N, K], [experts, N, K], or its last two swapped) and the `product` that multiplies it."""

    product: Product
    k_last: bool

    @staticmethod
    def wrap(value: Tensor, product: Product, *, k_last: bool = True) -> OperandWeight:
        operand = value.as_subclass(OperandWeight)
        operand.product, operand.k_last = product, k_last
        return operand

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or _HANDLERS.get(getattr(func, "overloadpacket", None))
        with torch._C.DisableTorchFunctionSubclass():
            if handler is not None:
                return handler(*args, **kwargs)
            result = func(*_plain(args), **_plain(kwargs))
        if isinstance(result, Tensor) and func not in _VALUES:
            raise NotImplementedError(
                f"quads: {getattr(func, '__name__', func)} on a quantised weight would skip its activation numerics;"
                " use a linear layer, or model.set_experts_implementation('grouped_mm')"
            )
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, OperandWeight):
        return value.as_subclass(Tensor)
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _need(weight: OperandWeight, k_last: bool, what: str) -> Product:
    if not isinstance(weight, OperandWeight) or weight.k_last is not k_last:
        raise NotImplementedError(f"quads: {what} with a quantised weight of shape {tuple(weight.shape)} transposed")
    return weight.product


def _rows(x: Tensor, product: Product) -> Tensor:
    x = product_input(x)
    with as_written(x):
        return product.matmul(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])


def _linear(input: Tensor, weight: OperandWeight, bias: Tensor | None = None) -> Tensor:
    y = _rows(input, _need(weight, True, "F.linear"))
    return y if bias is None else y + bias


def _matmul(input: Tensor, other: OperandWeight) -> Tensor:
    return _rows(input, _need(other, False, "matmul"))


def _bmm(input: Tensor, mat2: OperandWeight) -> Tensor:
    product = _need(mat2, False, "bmm")
    rows = input.shape[1]
    ends = torch.arange(1, input.shape[0] + 1, dtype=torch.int32, device=input.device) * rows
    input = product_input(input)
    with as_written(input):
        return product.grouped_matmul(input.flatten(0, 1), ends).unflatten(0, (-1, rows))


def _grouped_mm(input: Tensor, weight: OperandWeight, offs: Tensor, **_: Any) -> Tensor:
    input, product = product_input(input), _need(weight, False, "grouped_mm")
    with as_written(input):
        return product.grouped_matmul(input, offs)


def _getitem(weight: OperandWeight, index: Any) -> Any:
    value = weight.as_subclass(Tensor)[index]
    if weight.ndim == 3 and (isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0)):
        return OperandWeight.wrap(value, weight.product.expert(int(index)), k_last=weight.k_last)
    raise NotImplementedError(
        f"quads: a quantised weight of shape {tuple(weight.shape)} can be indexed by one expert at a time;"
        " use model.set_experts_implementation('grouped_mm')"
    )


def _transpose(weight: OperandWeight, dim0: int, dim1: int) -> Any:
    value = weight.as_subclass(Tensor).transpose(dim0, dim1)
    if {dim0 % weight.ndim, dim1 % weight.ndim} == {weight.ndim - 2, weight.ndim - 1}:
        return OperandWeight.wrap(value, weight.product, k_last=not weight.k_last)
    raise NotImplementedError("quads: a quantised weight can swap its last two dimensions only")


def _t(weight: OperandWeight) -> Any:
    return _transpose(weight, 0, 1)


# Operations that read the value for something other than a product: printing, comparing, exporting.
_VALUES = {
    Tensor.detach,
    Tensor.data.__get__,
    Tensor.clone,
    Tensor.to,
    Tensor.float,
    Tensor.cpu,
    Tensor.grad.__get__,
}

_HANDLERS: dict[Any, Any] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    Tensor.__getitem__: _getitem,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    Tensor.mT.__get__: lambda weight: _transpose(weight, -2, -1),
    Tensor.T.__get__: _t,
    Tensor.t: _t,
    torch._grouped_mm: _grouped_mm,
}
if hasattr(F, "grouped_mm"):
    _HANDLERS[F.grouped_mm] = _grouped_mm


def register_grouped_mm(op: Any) -> None:
    """Answer `op(input, weight, offs)`, a framework's own grouped product, too."""
    _HANDLERS[op] = _grouped_mm
