"""The one part that is compiled: `node_filter.c`. Without a compiler Python does its work. Everything else: pyproject.toml."""

from setuptools import Extension, setup

SOURCE = "src/shardwise/stage/llama/node_filter.c"
setup(ext_modules=[Extension("shardwise.stage.llama._node_filter", sources=[SOURCE], optional=True)])
