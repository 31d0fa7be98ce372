"""Hang detection: notices a collective that can never complete, and ends the job on all ranks with one message.

`flight_recorder.py` numbers and hashes what a rank issues, `side_channel.py` exchanges a few words through the
rendezvous store, `peer_processes.py` looks at ranks that do not answer, `hang_report.py` puts the states of all ranks
into words, and `watchdog.py`, a thread per rank, drives them:

```text
             leave()                 peers are done with the store, or another process hosts it
  WATCHING ----------> LEAVING ------------------------------------------------------------------> CLOSED
    |   ^                |   ^
    |   | the store      |   |
    |   | fell silent    |   |
    v   |                v   |
  ALARMED <------------------+      an alarm: this rank's own, or another's, heard through the store
    |
    |  one rank writes the hang report, all read it; without a store each rank writes its own
    v
  REPORTED --> ENDING               interrupt blocked threads, drain peers; exit code 75 if the process does not end
```

How a hang ends (all ranks unless noted):

1. A rank sees that one of its collectives is overdue, or can never complete: desync (a peer stalls at the same number
   with another history), deadlock (two ranks wait for calls that the other has not issued), a peer that has left
   without issuing it, or a closed connection. It raises the alarm.
2. Each rank that sees the alarm, within a second, publishes its state; one that still moves, once it has stopped, or
   after another second.
3. (one rank, the lowest that can) The states become one hang report, which is logged once. A rank that the store does
   not answer reports alone what it knows.
4. Threads blocked in a collective are interrupted and raise that report as an exception, so that `finally` blocks run.
   A process that does not raise, or does not exit after raising, is ended with exit code 75 after a few seconds. Ranks
   of this machine that are stopped (SIGSTOP) can do neither: they are woken and ended.

All of it stays within 15 seconds of the limit. It costs one round trip to the store per second and rank.
"""
