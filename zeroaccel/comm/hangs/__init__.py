"""Hang detection: notices a collective that can never complete, and ends the job on all ranks with one message.

`flight_recorder.py` numbers and hashes the collectives of a rank, `side_channel.py` exchanges short messages through
the rendezvous store, `peer_processes.py` inspects ranks that do not answer, `hang_report.py` composes a message from
the states of all ranks, and `watchdog.py`, a thread per rank, drives them:

```text
             leave()                 peers are done with the store, or another process hosts it
  WATCHING ----------> LEAVING ------------------------------------------------------------------> CLOSED
    |   ^                |   ^
    |   | the store      |   |
    |   | fell silent    |   |
    v   |                v   |
  ALARMED <------------------+      an alarm: raised by this rank, or read from the store
    |
    |  one rank writes the hang report, all read it; without a store each rank writes its own
    v
  REPORTED --> ENDING               interrupt blocked threads, drain peers; exit code 75 if the process does not end
```

How a hang ends (all ranks unless noted):

1. A rank detects that one of its collectives is overdue, or can never complete: desync (a peer stalls at the same
   number with another history), deadlock (two ranks wait for calls that the other has not issued), a peer that left
   without issuing it, or a closed connection. The rank raises the alarm.
2. Each rank sees the alarm within a second and publishes its state; a rank that still moves does so after it has
   stopped, or after another second.
3. (one rank, the lowest that can) It composes one hang report from the states and logs it once. If the store does not
   answer a rank, that rank reports alone, with its own knowledge.
4. The watchdog interrupts threads that are blocked in a collective; they raise the report as an exception, so that
   `finally` blocks run. If a process does not raise, or does not exit after raising, its watchdog ends it with exit
   code 75 after a few seconds. Ranks of this machine that are stopped (SIGSTOP) can do neither; other ranks wake and
   end them.

All of it takes less than 15 seconds after the limit. It costs one round trip to the store per second and rank.
"""
