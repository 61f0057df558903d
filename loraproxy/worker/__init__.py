"""The process that holds the model: engine, scheduler, prompt cache, sampling, and its HTTP API."""

import os

# Before anything loads the OpenMP library, which reads it then: its threads wait for one another many hundred times a
# step, and by default they spin for as long as it takes. Where another program has one of their processors, that is
# until the scheduler moves it: steps were seen to take many times as long. So they spin for about the time that
# waits last, then sleep (libgomp's documentation, GOMP_SPINCOUNT).
os.environ.setdefault("GOMP_SPINCOUNT", "500")
