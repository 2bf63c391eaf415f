"""Stands for the compiled kernels of SGLang where there is no build of them: any name can be imported, none can run.

The server on CPU computes with `--attention-backend torch_native`, which calls none of these. A name that is called
after all says so, instead of computing nonsense.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"
__path__ = []  # a package, so that `sgl_kernel.anything` can be imported


class _Missing:
    """A name that is there and can do nothing; whatever is looked up on it is like it."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name
        self.__module__ = "sgl_kernel"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self.__name__} is not built for this machine")

    def __mro_entries__(self, bases):
        return ()  # a class may be made from it; it inherits nothing


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below this one is like it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
