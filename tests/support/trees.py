"""Texts and syntax trees of source files: a process reads and parses each once for all tests of a module."""

import ast
import functools
import gc


@functools.cache
def text_of(path):
    """Text of a file that no test changes."""
    return path.read_text()


@functools.cache
def nodes_of(text):
    """All nodes of the syntax tree of a text, the module first. The nodes are shared: a test must not change them."""
    gc.disable()  # It would walk through all trees again and again, and free nothing.
    try:
        return list(ast.walk(ast.parse(text)))
    finally:
        gc.enable()


def forget_trees():
    """Free the memory of all texts and trees."""
    text_of.cache_clear()
    nodes_of.cache_clear()
