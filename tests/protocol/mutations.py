"""Defects of the threads and I/O around the two state machines, each with the test that finds it.

Those of the machines are in tests/sim/mutations.py.
"""

from __future__ import annotations

from typing import NamedTuple

SOCKETS, THREADS = "tests/pure/test_sockets.py::test_", "tests/pure/test_threads.py::test_"
PEERS = "tests/pure/test_peers.py::test_"
ROOMS, STRANGERS = "tests/pure/test_rooms.py::test_", "tests/pure/test_strangers.py::test_"
SERVERS = "tests/pure/test_prefill_servers.py::test_"
PLANES, RING = "tests/protocol/test_data_planes.py::test_", "tests/protocol/"


class Mutation(NamedTuple):
    """`text` of a file of the package, which it has once, becomes `replacement`. `test`: fails."""

    file: str
    text: str
    replacement: str
    test: str


MUTATIONS = {
    # -- what wakes a thread; sockets
    "an event wakes nobody": Mutation(
        "channel/sockets.py", "if wake:", "if False:",
        SOCKETS + "what_wakes_nobody_comes_with_the_next_event_in_order",
    ),
    "a thread that was woken never sleeps again": Mutation(
        "channel/sockets.py", "os.eventfd_read(self._wake)", "pass",
        SOCKETS + "what_wakes_nobody_comes_with_the_next_event_in_order",
    ),
    "a queue that was closed wakes another file's reader": Mutation(
        "channel/sockets.py", "wake, self._wake = self._wake, -1", "wake = self._wake",
        SOCKETS + "what_comes_after_its_end_wakes_no_other_file",
    ),
    "an event for a queue that was closed raises": Mutation(
        "channel/sockets.py", "suppress(OSError, ValueError)", "suppress(OSError)",
        SOCKETS + "what_comes_after_its_end_wakes_no_other_file",
    ),
    "messages are of any length": Mutation(
        "channel/sockets.py", "zmq.MAXMSGSIZE, MAX_BYTES", "zmq.MAXMSGSIZE, -1",
        SOCKETS + "a_message_that_is_too_long_costs_its_sender_the_connection",
    ),
    "nobody looks after idle connections": Mutation(
        "channel/sockets.py", "zmq.TCP_KEEPALIVE, 1", "zmq.TCP_KEEPALIVE, 0",
        SOCKETS + "the_kernel_looks_after_idle_connections",
    ),
    "a stranger's readers take the room of all": Mutation(
        "prefill/waiting.py", "self._places.take(part.connection)", "",
        ROOMS + "readers_that_one_connection_invents_leave_room_for_others",
    ),
    "libzmq looks after idle connections": Mutation(
        "channel/sockets.py", "zmq.TCP_KEEPALIVE, 1)",
        "zmq.HEARTBEAT_IVL, limit // 5), socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20 * limit)",
        SOCKETS + "a_peer_that_is_lost_with_many_messages_does_not_end_the_process",
    ),
    "a host that did not answer is asked again when the kernel likes": Mutation(
        "channel/sockets.py", "zmq.CONNECT_TIMEOUT, 2000", "zmq.CONNECT_TIMEOUT, 0",
        SOCKETS + "a_host_that_does_not_answer_is_asked_again_soon",
    ),
    "a message waits in a socket that has no connection": Mutation(
        "decode/peers.py", "zmq.IMMEDIATE, 1", "zmq.IMMEDIATE, 0",
        THREADS + "a_room_does_not_wait_for_a_prefill_rank_that_is_gone",
    ),
    "a rank that is dropped keeps its socket": Mutation(
        "decode/inbox.py", "        self._peers.drop(peer)\n", "",
        SERVERS + "nothing_is_left_of_servers_that_are_gone",
    ),
    "a rank that is dropped stays on the data plane": Mutation(
        "decode/inbox.py", "self._fetches.drop(peer)", "pass",
        SERVERS + "nothing_is_left_of_servers_that_are_gone",
    ),
    "a breaker outlives its prefill server": Mutation(
        "decode/rooms.py", "self.breaker.forget(event.peer)", "pass",
        ROOMS + "nothing_is_held_against_a_peer_that_is_gone",
    ),
    "a send hides what came before it": Mutation(
        "decode/peers.py", "self.poller.used(dealer)", "pass",
        PEERS + "a_message_that_came_before_a_send_is_read",
    ),
    "each look asks every socket": Mutation(
        "channel/sockets.py", "in self._used if", "in self._sockets.values() if",
        PEERS + "idle_peers_are_not_asked_for_messages",
    ),
    "what one look leaves in a socket waits for the next message": Mutation(
        "channel/sockets.py", "self._used = ready", "self._used = set()",
        PEERS + "more_messages_than_one_look_takes_need_no_further_signal",
    ),
    "what came before a socket was registered waits for the next message": Mutation(
        "channel/sockets.py", "self.used(at)", "pass",
        PEERS + "what_came_before_a_socket_was_registered_is_read",
    ),
    "each removal looks at the counts of all connections": Mutation(
        "prefill/waiting.py", "self._taken[connection] -= 1",
        "self._taken -= Counter([connection])",
        ROOMS + "what_invented_readers_leave_slows_nobody_down",
    ),
    "each answer that a peer does not take ends its connection": Mutation(
        "prefill/outbox.py", "if action.connection not in self._lost:", "if True:",
        STRANGERS + "answers_that_a_peer_does_not_take_end_its_connection_once",
    ),
    # -- slots, the gate
    "the slot that was free last is taken first": Mutation(
        "channel/slots.py", "self._free.popleft()", "self._free.pop()",
        "tests/pure/test_slots.py::test_the_slot_that_was_free_longest_is_taken",
    ),
    "a gate closes while rows are copied": Mutation(
        "channel/gate.py", "        if self.shut():\n            return",
        "        self.shut(); return",
        THREADS + "a_gate_closes_behind_the_copy_under_way",
    ),
    # -- prefill
    "a chunk is packed before its events are done": Mutation(
        "prefill/outbox.py", "pending = bool(pages.events)", "pending = False",
        THREADS + "a_chunk_is_packed_once_all_of_its_events_are_done",
    ),
    "one of a chunk's events is waited for": Mutation(
        "prefill/outbox.py", "all(map(_done", "any(map(_done",
        THREADS + "a_chunk_is_packed_once_all_of_its_events_are_done",
    ),
    "READY is sent before the rows are in the slot": Mutation(
        "prefill/outbox.py", "self._inlet.put(self._pack(job))",
        "self._inlet.put(ev.Packed(job.job)); time.sleep(0.2); self._pack(job)",
        THREADS + "every_row_is_in_place[20-0]",
    ),
    "rows that cannot be packed end the packing thread": Mutation(
        "prefill/outbox.py",
        'except Exception as error:\n            logger.exception("[MIXKV-SELF-01] draft KV',
        'except OSError as error:\n            logger.exception("[MIXKV-SELF-01] draft KV',
        THREADS + "a_copy_that_raises_is_the_loss_of_one_room[prefill-pack-prefill_pack]",
    ),
    "bytes that are no message end prefill's channel thread": Mutation(
        "prefill/outbox.py", "except ValueError as error:", "except OSError as error:",
        THREADS + "what_is_no_message_is_counted_and_nothing_more",
    ),
    "what is sent to a reader that is gone is dropped in silence": Mutation(
        "prefill/outbox.py", "zmq.ROUTER_MANDATORY, 1", "zmq.ROUTER_MANDATORY, 0",
        THREADS + "a_use_does_not_wait_for_a_reader_that_is_gone",
    ),
    "a reader's lost connection is not reported": Mutation(
        "prefill/outbox.py", "self._inlet.put(ev.ConnectionLost(action.connection))", "pass",
        THREADS + "a_use_does_not_wait_for_a_reader_that_is_gone",
    ),
    "requests wait for a channel thread of prefill that has ended": Mutation(
        "prefill/outbox.py", "self._broken.set()", "pass",
        THREADS + "nobody_waits_for_a_prefill_rank_whose_thread_has_ended",
    ),
    "a prefill rank ends while its slots are read": Mutation(
        "prefill/outbox.py", "while self._rooms.slots.offered", "while False",
        THREADS + "a_prefill_rank_that_ends_waits_for_what_it_has_offered",
    ),
    "a segment has more tokens than its slot holds": Mutation(
        "prefill/packing.py", "limit = self._segment_tokens(len(opened.wanted), opened.slot_bytes)",
        "limit = 1 << 20", THREADS + "every_row_is_in_place[20-0]",
    ),
    # -- decode: channel thread
    "rows are written while an earlier forward may write them": Mutation(
        "decode/inbox.py", "self._waiting.items() if _is_done(event)", "self._waiting.items()",
        THREADS + "rows_are_written_once_an_earlier_forward_is_done",
    ),
    "a request's end leaves its gate open": Mutation(
        "decode/inbox.py", "entry.gate.close()", "pass",
        THREADS + "a_gate_closes_behind_the_copy_under_way",
    ),
    "the target's arrival starts no clock": Mutation(
        "decode/inbox.py", "self._inlet.put(ev.TargetArrived(entry.opened.generation), wake=False)",
        "pass", THREADS + "draft_kv_is_waited_for_from_the_targets_arrival_on",
    ),
    "an OPEN that could not be sent counts as sent": Mutation(
        "decode/inbox.py", "self._inlet.put(ev.PeerLost(action.peer, gone))", "pass",
        THREADS + "a_room_does_not_wait_for_a_prefill_rank_that_is_gone",
    ),
    "a prefill rank that was restarted is not forgotten": Mutation(
        "decode/inbox.py", "self._forget(action.peer)", "pass",
        THREADS + "a_rank_that_was_restarted_says_so_and_is_forgotten",
    ),
    "rooms of a rank that is dropped wait for it": Mutation(
        "decode/inbox.py", "self._handle(ev.PeerLost(peer, gone=True))", "pass",
        THREADS + "rooms_of_a_rank_that_is_dropped_end_and_others_go_on",
    ),
    "the end of the copying thread is not noticed": Mutation(
        "decode/inbox.py", "self._copier.thread.is_alive()", "True",
        THREADS + "rooms_of_a_decode_rank_whose_thread_has_ended_are_cleared[copies]",
    ),
    # -- decode: reads
    "the ACK is sent before the read has ended": Mutation(
        "decode/fetches.py", "outcome = self._plane.outcome(read)",
        "outcome = self._plane.outcome(read) or Outcome.DONE",
        THREADS + "a_read_holds_the_slots_of_both_sides_until_it_has_ended",
    ),
    "the slots of a read that was given up are free while its bytes may land": Mutation(
        "decode/fetches.py", "if self._plane.settled(read):", "if True:",
        THREADS + "so_does_a_read_that_was_given_up",
    ),
    "a read that takes too long is waited for": Mutation(
        "decode/reads.py", "if segment.started > limit:", "if True:",
        THREADS + "so_does_a_read_that_was_given_up",
    ),
    "a connection that broke stays broken": Mutation(
        "decode/fetches.py", "                self._mend(peer)\n", "",
        THREADS + "a_read_that_fails_has_its_connection_mended",
    ),
    "a read that was given up counts as settled": Mutation(
        "channel/data_plane.py", "return self._poll(read) is not None",
        "return read.given_up or self._poll(read) is not None",
        THREADS + "so_does_a_read_that_was_given_up",
    ),
    "a peer is released while its bytes may land": Mutation(
        "channel/data_plane.py", "if not peer.gone or peer.reads or", "if not peer.gone or",
        PLANES + "a_peer_is_forgotten_when_its_reads_have_ended[mooncake]",
    ),
    "a read outside the registered memory reaches the backend": Mutation(
        "channel/data_plane.py", "if not inside or not peer.endpoint.memory.holds(remote, length):",
        "if False:", PLANES + "an_address_outside_the_memory_fails[mooncake]",
    ),
    "two threads ask the backend for one read at once": Mutation(
        "channel/data_plane.py", "with read.polling:", "if True:",
        PLANES + "a_read_is_looked_at_by_one_thread_at_a_time",
    ),
    "a data plane is closed while its reads run": Mutation(
        "channel/data_plane.py", "while any(peer.reads", "while False and any(peer.reads",
        PLANES + "close_lets_reads_end[mooncake]",
    ),
    "start waits for a connection that is being made": Mutation(
        "channel/data_plane.py",
        "if peer.gone or not peer.connecting.acquire(blocking=False):\n            return _failed",
        "if peer.gone or not peer.connecting.acquire(timeout=2):\n            return _failed",
        PLANES + "start_does_not_wait_for_connect",
    ),
    "Mooncake reads from the instance that was at an address before": Mutation(
        "channel/mooncake.py", "'0' * self._names[session]", "''",
        PLANES + "mooncake_names_each_instance_at_an_address",
    ),
    # -- decode: copies
    "rows are written behind a closed gate": Mutation(
        "decode/copier.py", "if not is_open:", "if False:",
        THREADS + "no_job_passes_a_closed_gate",
    ),
    "a slot that was used again is unpacked": Mutation(
        "decode/copier.py", "!= (job.stamp, job.stamp)", "is None",
        THREADS + "a_slot_that_changed_under_a_read_is_not_used[stamp]",
    ),
    "a checksum is made and not compared": Mutation(
        "decode/copier.py", "if found != job.checksum:", "if False:",
        THREADS + "a_slot_that_changed_under_a_read_is_not_used[payload]",
    ),
    "rows that cannot be unpacked end the copying thread": Mutation(
        "decode/copier.py",
        'except Exception as error:\n            logger.exception("[MIXKV-SELF-01] draft KV',
        'except OSError as error:\n            logger.exception("[MIXKV-SELF-01] draft KV',
        THREADS + "a_copy_that_raises_is_the_loss_of_one_room[decode-unpack-unpack]",
    ),
    "rooms of a rank whose threads have ended keep another request's rows": Mutation(
        "decode/copier.py", "self._rows.clear(entry.rows(entry.opened.first_token,",
        "print(entry.rows(entry.opened.first_token,",
        THREADS + "rooms_of_a_decode_rank_whose_thread_has_ended_are_cleared[channel]",
    ),
    "a cold room zeroes rows that are in place": Mutation(
        "decode/copies.py", "room.placed_to, room.opened.end", "0, room.opened.end",
        "tests/pure/test_rooms.py::test_rows_that_are_in_place_are_not_cleared",
    ),
    # -- SGLang's classes
    "a request succeeds before its draft KV is there": Mutation(
        "engine/receiver.py", "if entry.state is None:", "if False:",
        RING + "test_late_events.py::"
        "test_rows_are_written_behind_the_forward_that_may_still_write_them[mooncake-warm]",
    ),
    "metadata leaves for a server that is refused": Mutation(
        "engine/receiver.py", "if servers is not None and reason is not None and", "if False and",
        RING + "test_peers.py::test_a_stock_prefill_is_refused[mooncake-1-1]",
    ),
    "rows of a cached prefix are counted twice": Mutation(
        "engine/receiver.py", "first_token=first,", "first_token=0,",
        RING + "test_channel.py::test_every_byte[mooncake-2-1]",
    ),
    "a request whose rows could not be cleared is served": Mutation(
        "engine/receiver.py", "if entry.state is ev.State.FAILED:", "if False:",
        RING + "test_faults.py::test_fault"
        "[mooncake-rows and slots: unpacking and clearing raise]",
    ),
    "a chunk is sent before the forward that writes it": Mutation(
        "engine/sender.py", 'getattr(self, "_early_send_wait_event", None)', "None",
        RING + "test_late_events.py::"
        "test_an_early_chunk_waits_for_the_forward_that_writes_it[mooncake]",
    ),
    "prefill succeeds before its rows are packed": Mutation(
        "engine/sender.py", "if not self.use.settled:", "if False:",
        RING + "test_late_events.py::"
        "test_an_early_chunk_waits_for_the_forward_that_writes_it[mooncake]",
    ),
    "a sender that was cleared leaves its room": Mutation(
        "engine/sender.py", 'self._end("")', "pass",
        RING + "test_channel.py::test_every_byte[mooncake-2-1]",
    ),
    "requests of a server that was restarted go to its former connections": Mutation(
        "engine/manager.py", "                del pool[key]\n", "                pass\n",
        RING + "test_manager.py::test_a_server_of_which_a_rank_was_restarted_is_asked_anew",
    ),
    "the facts of a server that SGLang has given up are believed": Mutation(
        "engine/manager.py", "self.servers.forget(failed_bootstrap_addr)", "pass",
        RING + "test_manager.py::test_a_server_that_sglang_gives_up_is_forgotten_first",
    ),
    # -- prefill servers
    "the scheduler waits for each new server": Mutation(
        "engine/workers.py", "min(most, self._left / 2)", "most",
        SERVERS + "the_scheduler_waits_for_all_new_servers_together_as_long_as_for_two",
    ),
    "servers that are hung take all threads": Mutation(
        "engine/workers.py", "AT_ONCE // 2 if failed else AT_ONCE", "AT_ONCE",
        SERVERS + "work_that_has_failed_before_leaves_threads_for_other_work",
    ),
    "one server's rows name another one's ranks": Mutation(
        "decode/events.py", "return instance + server.encode()", "return instance",
        SERVERS + "a_server_ends_nothing_of_another",
    ),
    "a server that was forgotten is connected to all the same": Mutation(
        "engine/prefill_servers.py", "                gone = server.gone\n",
        "                gone = False\n",
        SERVERS + "nothing_is_left_of_a_server_that_is_given_up_while_it_is_connected_to",
    ),
    "a refused server is asked with each request": Mutation(
        "engine/prefill_servers.py", " and time.monotonic() < server.again", " and False",
        SERVERS + "a_refused_server_is_asked_again_but_not_with_each_request",
    ),
    "a server that was refused once is never asked again": Mutation(
        "engine/prefill_servers.py",
        "        self._table.pop(address, None)\n        self._refused", "        self._refused",
        SERVERS + "a_refused_server_is_asked_again_but_not_with_each_request",
    ),
    "an abort that came before its request is not sent again": Mutation(
        "engine/refused.py", "for delay in SENT_AFTER_S:", "for delay in SENT_AFTER_S[:1]:",
        SERVERS + "each_rank_of_a_refused_server_is_told_more_than_once",
    ),
    "an abort that cannot be sent ends the thread": Mutation(
        "engine/refused.py", "except Exception:", "except ZeroDivisionError:",
        SERVERS + "a_message_that_cannot_be_sent_does_not_end_the_thread",
    ),
    # -- pools
    "a retracted request drafts from another's rows": Mutation(
        "engine/draft_pool.py", "buffer[rows] = 0", "pass",
        RING + "test_metrics.py::test_rows_that_a_backup_leaves_out_are_zeroed",
    ),
    "a part of a drafter's pool stays behind": Mutation(
        "engine/draft_pool.py", "if any(getattr(pool, scale, None) is not None", "if any(False",
        RING + "test_draft_pool.py::test_a_pool_that_cannot_be_cut_does_not_start",
    ),
    "a queue whose start failed has lost its draft pool": Mutation(
        "engine/handover.py", "            queue.draft_token_to_kv_pool = pool\n",
        "            pass\n",
        RING + "test_draft_pool.py::test_the_pool_is_back_where_sglang_fails",
    ),
}  # fmt: skip
