"""The program of `horovodrun -np 2 python -m MODULE`: runs the module that its first argument names, as `python -m`."""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # in place of this file's folder
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
