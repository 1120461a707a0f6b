"""Public names of a package that are imported on first use: those that it imports for type checkers."""

import ast
import sys
from importlib import import_module
from typing import Any


def public_imports(package: str) -> dict[str, str]:
    """Name -> module of each `from MODULE import NAME as NAME` in the block `if TYPE_CHECKING` of a package."""
    loader: Any = sys.modules[package].__loader__
    blocks = (node.body for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}


def import_name(package: str, name: str, imports: dict[str, str]) -> Any:
    """A name in `public_imports`, from its module, or a module of the package. Raises AttributeError for any other name."""
    if name not in imports:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    if imports[name] == package:
        return import_module(f"{package}.{name}")
    return getattr(import_module(imports[name]), name)
