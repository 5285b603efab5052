"""A module whose import announces that it has begun, and then never ends."""

import os
import signal

with open(os.environ["SLOW_MODULE_TELLS"], "w") as pipe:
    pipe.write(f"{os.getpid()}\n")
while True:
    signal.pause()
