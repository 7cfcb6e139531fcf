"""Runs the module that is named first, with the arguments behind it.

The interpreter was started with -I: neither the current directory nor the environment says what is imported. Places
that -I leaves out are appended behind the standard library, where the package is installed there: the user's own
site-packages, and PYTHONPATH's absolute folders if the package is nowhere else. The exit status is 3 if the package is
nowhere at all.
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
