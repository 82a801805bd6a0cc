"""Rewrites a script's syntax tree so that it uses the CPU in place of GPUs.

    "cuda", "cuda:1", f"cuda:{rank}", "cuda:" + n      -> "cpu"         torch.device("cuda", 1)  -> torch.device("cpu")
    "nccl", "cpu:gloo,cuda:nccl"                       -> "gloo"
    tensor.cuda(...)                                   -> tensor.to("cpu")
    torch.cuda, from torch import cuda                 -> oneemb.compat.cuda
    device=number, x.to(number), torch.device(number)  -> "cpu", decided when the script runs
    barrier(device_ids=...) and the like               -> without these arguments

Invariant: a replacement has the line and column of what it replaces, so tracebacks point into the script. Annotations
stay as they are, since torch has its GPU classes also without a GPU.
"""

import ast
import re
from collections import Counter
from typing import TypeVar

_CUDA = "__oneemb_cuda__"
_STANDS_FOR_CUDA = "oneemb.compat.cuda"
_DEVICE = re.compile(r"cuda(:\d+)?")
_BACKEND = re.compile(r"nccl|((cpu:gloo|cuda:nccl)(,|$))+")
# Strings into which a script puts the device's number, by `format` or `%`.
_NUMBERED = {"cuda:{}", "cuda:{0}", "cuda:%d", "cuda:%s", "cuda:%i"}
# {function: its arguments that name a rank's GPUs}.
_DROPPED = {
    "barrier": {"device_ids"},
    "init_process_group": {"device_id"},
    "DistributedDataParallel": {"device_ids", "output_device"},
    "DDP": {"device_ids", "output_device"},
}

_Node = TypeVar("_Node", bound=ast.AST)


def rewrite(source: bytes | str, path: str) -> tuple[ast.Module, Counter[str]]:
    """Rewritten tree of the module at `path`, and the number of replacements of each kind. SyntaxError if `source` is
    not Python."""
    tree = ast.parse(source, filename=path)
    rules = _Rules(tree)
    tree = rules.visit(tree)
    if rules.needs_cuda:
        after = _end_of_head(tree.body)
        imported = ast.Import([ast.alias(_STANDS_FOR_CUDA, _CUDA)], lineno=1, col_offset=0)
        tree.body.insert(after, imported)
    return ast.fix_missing_locations(tree), +rules.replaced


def _end_of_head(body: list[ast.stmt]) -> int:
    """Index of the first statement after the docstring and imports from __future__, which must stay first."""
    after = 0
    for place, node in enumerate(body):
        text = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        after = place + 1
    return after


class _Rules(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        imported = [one for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
        self.torch = {"torch"} | {one.asname for one in imported if one.name == "torch" and one.asname is not None}
        self.replaced: Counter[str] = Counter()
        self.needs_cuda = False

    # ---- texts

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _DEVICE.fullmatch(node.value):
            return self._text(node, "cpu", "'cuda'")
        if isinstance(node.value, str) and _BACKEND.fullmatch(node.value):
            return self._text(node, "gloo", "'nccl'")
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        head, rest = node.values[:1], node.values[1:]
        if head and isinstance(head[0], ast.Constant) and head[0].value == "cuda:":
            if all(isinstance(part, ast.FormattedValue) for part in rest):
                return self._text(node, "cpu", "'cuda'")
        # A part of a longer string is no device.
        node.values = [part if isinstance(part, ast.Constant) else self.visit(part) for part in node.values]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left = node.left.value if isinstance(node.left, ast.Constant) else None
        added = isinstance(node.op, ast.Add) and left == "cuda:"
        filled = isinstance(node.op, ast.Mod) and isinstance(left, str) and left in _NUMBERED
        return self._text(node, "cpu", "'cuda'") if added or filled else self.generic_visit(node)

    def _text(self, node: ast.AST, text: str, kind: str) -> ast.AST:
        self.replaced[kind] += 1
        return ast.copy_location(ast.Constant(text), node)

    # ---- calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func
        if isinstance(called, ast.Attribute):
            owner = called.value
            if called.attr == "cuda" and not self._is_torch(owner):
                self.replaced[".cuda()"] += 1
                method = ast.copy_location(ast.Attribute(self.visit(owner), "to", ast.Load()), called)
                return self._call(method, [ast.Constant("cpu")], node)
            if called.attr == "format" and isinstance(owner, ast.Constant) and owner.value in _NUMBERED:
                return self._text(node, "cpu", "'cuda'")
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        kept = [one for one in node.keywords if one.arg not in _DROPPED.get(name, set())]
        self.replaced.update(one.arg for one in node.keywords if one not in kept and one.arg is not None)
        node.keywords = kept
        self.generic_visit(node)
        of_torch = isinstance(called, ast.Attribute) and name == "device" and self._is_torch(called.value)
        if of_torch and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "cpu":
            node.args, node.keywords = node.args[:1], []
        if node.args and (of_torch or (name == "to" and isinstance(called, ast.Attribute))):
            node.args[0] = self._placed(node.args[0])
        for keyword in node.keywords:
            if keyword.arg == "device":
                keyword.value = self._placed(keyword.value)
        return node

    def _placed(self, node: ast.expr) -> ast.expr:
        """Expression for a device; a call of `cuda.place` around it if it may be a GPU's number."""
        number = isinstance(node, ast.Constant) and type(node.value) is int
        if not number and not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            return node
        place = ast.copy_location(ast.Attribute(self._cuda(node), "place", ast.Load()), node)
        return self._call(place, [node], node)

    def _call(self, function: ast.expr, args: list[ast.expr], node: _Node) -> ast.Call:
        for one in args:
            if not hasattr(one, "lineno"):
                ast.copy_location(one, node)
        return ast.copy_location(ast.Call(function, args, []), node)

    # ---- torch.cuda

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and self._is_torch(node.value) and isinstance(node.ctx, ast.Load):
            self.replaced["torch.cuda"] += 1
            return self._cuda(node)
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for one in node.names:
            if one.name == "torch.cuda":
                self.replaced["torch.cuda"] += 1
                one.name = "torch" if one.asname is None else _STANDS_FOR_CUDA
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        if node.level == 0 and node.module == "torch.cuda":
            self.replaced["torch.cuda"] += 1
            node.module = _STANDS_FOR_CUDA
        elif node.level == 0 and node.module == "torch":
            found = [one for one in node.names if one.name == "cuda"]
            if found:
                self.replaced["torch.cuda"] += 1
                ours = ast.copy_location(ast.ImportFrom("oneemb.compat", found, 0), node)
                node.names = [one for one in node.names if one.name != "cuda"]
                return [node, ours] if node.names else ours
        return node

    def _cuda(self, node: ast.AST) -> ast.expr:
        self.needs_cuda = True
        return ast.copy_location(ast.Name(_CUDA, ast.Load()), node)

    def _is_torch(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.torch

    # ---- annotations

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    visit_AsyncFunctionDef = visit_FunctionDef
