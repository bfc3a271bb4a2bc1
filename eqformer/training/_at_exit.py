"""What still runs when a program ends."""

import sys
import threading
import weakref
from collections.abc import Callable


def finished_at_exit(method: Callable[[], object]) -> None:
    """Have an object's method called when the program ends, unless the object is gone; its errors are shown.

    It is called before Python shuts executors down, and so what runs in the background can still end. `atexit` comes
    after that. Where Python has no such hook, nothing is called.
    """
    held = weakref.WeakMethod(method)

    def finish() -> None:
        found = held()
        try:
            if found is not None:
                found()
        except Exception as error:  # raised here, it would keep other hooks from running
            sys.excepthook(type(error), error, None)

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(finish)
