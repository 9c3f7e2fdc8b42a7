"""An environment of one's own, for whole runs of the recipes; variables make it slow, fail or send a signal."""

import os
import threading
import time

import agentenv


class Vowels(agentenv.BaseEnv):
    """Reward 1 where the answer holds more vowels than digits; one turn. Its Nth training task sends a signal."""

    resets = 0
    lock = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed < 2**31 and os.environ.get("VOWELS_SIGNAL"):
            number, after = os.environ["VOWELS_SIGNAL"].split()
            with self.lock:
                Vowels.resets += 1
                if Vowels.resets == int(after):
                    os.kill(os.getpid(), int(number))
        if seed < 2**31 and os.environ.get("VOWELS_FAIL"):
            raise OSError("the shop is closed")
        if seed < 2**31:
            time.sleep(float(os.environ.get("VOWELS_S", "0")))
        return "Write vowels.", {"task_id": f"t{seed}"}

    def step(self, action):
        won = sum(c in "aeiou" for c in action) > sum(c.isdigit() for c in action)
        return "", float(won), True, False, {"success": won}
