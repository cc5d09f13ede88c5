"""What the source of every kernel must hold to, read without running it."""

import ast
from pathlib import Path

import pytest

from trinfer.kernels import OPS

FOLDER = Path(__file__).parents[2] / "trinfer" / "kernels"
FILES = sorted(FOLDER.glob("*.py"))


def calls(tree, name):
    """Calls of the Triton function `tl.<name>`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def jit_functions(tree):
    """Functions decorated with @triton.jit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_u020_masked_loads_say_what_masked_lanes_hold(path):
    for call in calls(ast.parse(path.read_text()), "load"):
        names = {keyword.arg for keyword in call.keywords}
        assert len(call.args) == 1, f"{path.name}:{call.lineno}: pass mask and other by name"
        assert ("mask" in names) == ("other" in names), f"{path.name}:{call.lineno}: mask= without other="


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_use_only_what_every_triton_version_has(path):
    source = path.read_text()
    for banned in (
        "make_block_ptr",
        "triton.autotune",
        "triton.heuristics",
        "libdevice",
        "inline_asm",
        "tl.advance",
    ):
        assert banned not in source, f"{path.name} uses {banned}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_products_of_tiles_go_through_the_shared_dot(path):
    for call in calls(ast.parse(path.read_text()), "dot"):
        assert path.name == "elements.py", f"{path.name}:{call.lineno}: call elements.dot"
        names = {keyword.arg for keyword in call.keywords}
        assert {"input_precision", "out_dtype"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_return_once_at_their_end(path):
    for function in jit_functions(ast.parse(path.read_text())):
        for node in ast.walk(function):
            if isinstance(node, ast.Return):
                assert node is function.body[-1], f"{path.name}:{node.lineno}: early return"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_program_ids_are_widened_before_a_stride_multiplies_them(path):
    """A stride may multiply what was widened, or an offset inside a tile, nothing else."""
    for function in jit_functions(ast.parse(path.read_text())):
        wide = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                if "tl.int64" in ast.unparse(node.value) or names & wide:
                    wide.add(node.targets[0].id)
        for node in ast.walk(function):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            factor = ast.unparse(node.left)
            if "stride_" not in ast.unparse(node.right):
                continue
            names = {n.id for n in ast.walk(node.left) if isinstance(n, ast.Name)}
            is_inside_a_tile = all(name.startswith(("offs_", "BLOCK_")) for name in names)
            is_wide = "tl.int64" in factor or bool(names & wide)
            assert is_wide or is_inside_a_tile, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("op", [op.name for op in OPS])
def test_every_op_has_two_property_tests(op):
    """Each draws 50 examples under the sanitizer: see conftest.py."""
    text = Path(__file__).with_name(f"test_{op}.py").read_text()
    assert text.count("\n@given(") >= 2
