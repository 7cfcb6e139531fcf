"""Runs the module that the first argument names, with the arguments that follow.

The interpreter was started with -I, so neither the current directory nor the environment determines what is imported.
Folders that -I leaves out are appended after the standard library if the package is installed there: the user's
site-packages, and PYTHONPATH's absolute folders if the package is nowhere else. The exit status is 3 if the package is
not found at all.
"""

import importlib.util
import os
import runpy
import site
import sys

own = site.getusersitepackages()
if sys.prefix == sys.base_prefix and os.path.isdir(own):
    site.addsitedir(own)
if importlib.util.find_spec("forebay") is None:
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [folder for folder in named if os.path.isabs(folder)]
    if importlib.util.find_spec("forebay") is None:
        print(f"{sys.executable} has no forebay", file=sys.stderr)
        sys.exit(3)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
