"""Every order of events of one request with two readers: an explicit-state model checker.

A *world* is the two state machines' real code and what is around them: messages on their way (in
order, per connection), the packing and the copying threads (in order), reads (in any order), what
is in each slot and in each row of the pool (not bytes: whose they are), and SGLang's own steps.
`World.steps` lists what can happen next, `World.disturbances` what can go wrong now; `Search` goes
on from every world that can be reached, and asks of each what must hold.

What makes the number of worlds bearable, and why nothing is missed:

* Equal worlds are visited once. A machine's state is named by a fingerprint (`freeze`) in which
  times are ages. The machines are deterministic and compare times with each other alone, so equal
  fingerprints act alike; an answer is worked out once for each state and event.
* A world is three numbers: the prefill side and two readers. What a reader can do depends on
  itself and on a `View` of prefill, and is worked out once for each pair of them.
* A copy is made when its end is handled, or just before its gate closes. Between, nothing else
  depends on whether it was made, so other moments lead to the same worlds.
* Worlds are searched by the number of disturbances. One that was reached with fewer is not visited
  again: from there everything was tried that more could lead to.
* Time passes if nothing else can happen, or as a disturbance (`early`). A world in which nothing
  happens and time changes nothing is an end, and has to be clean.

A tick is a second, and `Steps` are the channel's times in these: in the order of the real ones,
and `slot_aside` longer than a READY on its way and its read together.
"""
