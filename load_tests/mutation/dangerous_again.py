"""Sixty changes more in dangerous rooms (dangerous.py), of which there are more here: engine/ with waiting.py, fairness.py, plan.py and sequence.py;
kernels/sample.py; all of edge_router/ that is no policy and no page; wire/, sites/; and of runtime/ the output, continuation, and functions' host,
bindings and channel.

Files in an order given by a seed (20261126), in each three statements; the changes at those were written by operators (a comparison's bound, a
condition negated or without one of its parts, a statement dropped, a number one higher, arguments swapped), in an order given by the seed, and the
first is taken that a person might have made and that does not break every use of its file. Whoever took it had read the code and the tests of many
of these files, and had written tests for 123 other changes that were drawn alike. The tests noticed 36 of the sixty when they were first tried. One
had dropped a statement without effect, which is gone; the other 23 have tests of their own since.
"""

from load_tests.mutation.mutant import Mutant

DANGEROUS_AGAIN = (
    Mutant(
        "runtime/functions/host/priority.py",
        "if pid:",
        "if False:",
        "the threads of an isolate that is to give way, and what it has forked, do not",
    ),
    Mutant(
        "edge_router/relay.py",
        "if not self._choices:",
        "if self._choices:",
        "the next site is not told what a client has of its answer",
    ),
    Mutant(
        "edge_router/batches/lines.py",
        "if name:",
        "if False:",
        "an answer of a batch does not say which request it is for",
    ),
    Mutant(
        "engine/kv/slabs.py",
        "(slab, slab + 1)",
        "(slab, slab)",
        "a slab that stands alone brings no blocks",
    ),
    Mutant(
        "runtime/functions/host/socket_relay.py",
        "continue\n            self._active_at = asyncio.get_running_loop().time()",
        "continue\n            pass",
        "a client that talks is ended as if it were silent",
    ),
    Mutant(
        "engine/kv/prefix_index.py",
        "images_name(images, start, start + block_size)",
        "images_name(images, start, start)",
        "blocks of one image are taken for those of another",
    ),
    Mutant(
        "runtime/functions/bindings/crons.py",
        "task.cancel()",
        "pass",
        "the clock of a function that is replaced runs on, and nothing ends",
    ),
    Mutant(
        "edge_router/routes.py",
        "self._sessions.visitor(request, scope)",
        "pass",
        "what is an operator's is open to everybody",
    ),
    Mutant(
        "runtime/functions/bindings/r2.py",
        'if unknown := set(request.include) - {"httpMetadata", "customMetadata"}:',
        "if unknown := set():",
        "a word that means nothing in a list of objects is taken",
    ),
    Mutant(
        "wire/prefixes.py",
        "if len(raw) % SHORT_BYTES or len(raw) > MAX_PUBLISHED * SHORT_BYTES:\n        raise ValueError(",
        "if len(raw) % SHORT_BYTES or len(raw) > MAX_PUBLISHED * SHORT_BYTES:\n        ValueError(",
        "half an entry is taken for a digest",
    ),
    Mutant(
        "edge_router/published_status.py",
        "self._set(status, asked_at)\n        return True",
        "self._set(status, asked_at)\n        return False",
        "what was sent before a status counts beside it",
    ),
    Mutant(
        "runtime/functions/bindings/object_migrations.py",
        "durable.write(record, json.dumps(done).encode())",
        "pass",
        "classes are deleted again at each start",
    ),
    Mutant(
        "engine/kv/tiered_cache.py",
        " or not self._store.is_usable",
        "",
        "a store that does not answer is asked again and again",
    ),
    Mutant(
        "runtime/functions/host/egress_sockets.py",
        "await socket.close(code=code, message=message.reason.encode())",
        "pass",
        "the far side does not hear that a function has closed its socket",
    ),
    Mutant(
        "runtime/functions/bindings/model_service.py",
        'raise BindingError(f"run takes the inputs of {self._model} as one dict", name="TypeError")',
        'BindingError(f"run takes the inputs of {self._model} as one dict", name="TypeError")',
        "a function that calls a model wrongly is told of a fault of the site's",
    ),
    Mutant(
        "runtime/admission.py",
        "self.inflight -= 1\n            self._look_whether_empty()",
        "self.inflight -= 1\n            pass",
        "a site that drains waits for ever behind its last request",
    ),
    Mutant(
        "runtime/functions/host/zygote_budget.py",
        "+= COPIED_MIB",
        "-= COPIED_MIB",
        "functions that nobody asks for fill the memory",
    ),
    Mutant(
        "engine/kv/block_mover.py",
        "if fetch.is_cancelled:",
        "if False:",
        "blocks are written for a sequence that has lost them",
    ),
    Mutant(
        "engine/kv/block_parts.py",
        "Piece(0, 0, block_bytes)",
        "Piece(1, 0, block_bytes)",
        "another host's block is read from its second byte on",
    ),
    Mutant(
        "runtime/functions/host/imports.py",
        "(count := count + 1)",
        "(count := count)",
        "of a folder with a million files all are read",
    ),
    Mutant(
        "edge_router/router.py",
        "await stack.enter_async_context(_at_work(store))",
        "pass",
        "what was kept is neither written nor answered",
    ),
    Mutant(
        "sites/rules.py",
        'if odd := [group[0] for group in groups if group[0].startswith("ray:")]:\n        raise ValueError(',
        'if odd := [group[0] for group in groups if group[0].startswith("ray:")]:\n        ValueError(',
        "an engine host is to run where the site is not",
    ),
    Mutant(
        "runtime/functions/bindings/d1.py",
        "1 <= len(request.statements)",
        "1 < len(request.statements)",
        "a batch of one statement is refused",
    ),
    Mutant(
        "runtime/functions/bindings/assets.py",
        "is_inside and status.st_size <= MAX_ASSET_BYTES",
        "status.st_size <= MAX_ASSET_BYTES",
        "a link among a function's files leads to any file of the machine",
    ),
    Mutant(
        "runtime/functions/channel/socket_messages.py",
        "size > self._max_bytes",
        "size >= self._max_bytes",
        "a message of the largest size is refused",
    ),
    Mutant(
        "engine/kv/tier_read.py",
        "if self.is_done:",
        "if False:",
        "what was read for a sequence that has left stays pinned",
    ),
    Mutant(
        "engine/kv/groups.py",
        "if i >= first]",
        "if i > first]",
        "the oldest block that a window sees is thought to be there already",
    ),
    Mutant(
        "edge_router/tunnels.py",
        'while (await receive())["type"] != "websocket.disconnect":',
        'while (await receive())["type"] == "websocket.disconnect":',
        "a client that speaks before its handshake is answered has left",
    ),
    Mutant(
        "wire/errors.py",
        '"error" if named else None',
        '"error" if False else None',
        "an error inside a stream has no name where its dialect wants one",
    ),
    Mutant(
        "runtime/functions/bindings/queues.py",
        "self._deliveries.discard(task)",
        "pass",
        "batches that have ended are kept for ever",
    ),
    Mutant(
        "edge_router/health.py",
        "backend.round_trip.observe(elapsed_ms / fetched.round_trips)",
        "pass",
        "a site is as near as the map says, for ever",
    ),
    Mutant(
        "wire/http/exchange.py",
        "self.is_gone = True",
        "self.is_gone = False",
        "an application is not told that its client has left",
    ),
    Mutant(
        "engine/kv/slab_policy.py",
        "lease.slabs | set(",
        "lease.slabs & set(",
        "a model is thought to be full while memory is free",
    ),
    Mutant(
        "runtime/functions/host/response_stream.py",
        "if isinstance(error, Fault):",
        "if False:",
        "a function's author does not hear why its streams end",
    ),
    Mutant(
        "engine/kv/arena.py",
        "if self._pages is not None:",
        "if False:",
        "an arena's memory is there twice",
    ),
    Mutant(
        "runtime/functions/bindings/r2_headers.py",
        "value is not None and (not _is_plain(value) or value in UNSAID)",
        "value is not None",
        "what has a header of S3's own is counted twice",
    ),
    Mutant(
        "runtime/functions/bindings/sql.py",
        ">= 0:",
        "> 0:",
        "a script that begins with a semicolon is one statement",
    ),
    Mutant(
        "runtime/functions/host/site_zygote.py",
        "self.start()",
        "pass",
        "after its zygote has died a site runs no further function",
    ),
    Mutant(
        "wire/deployments.py",
        "if self.shares else None",
        "if False else None",
        "clients at the end of the shares have no version",
    ),
    Mutant(
        "runtime/functions/bindings/asset_rules.py",
        "not has_host and not source",
        "not has_host or not source",
        "a rule for a host is dropped without a word",
    ),
    Mutant(
        "runtime/functions/host/loop_probe.py",
        "self._ping.cancel()",
        "pass",
        "a ping outlives its isolate",
    ),
    Mutant(
        "runtime/functions/host/pool.py",
        "self.waiters.close()",
        "pass",
        "requests wait for a function that is gone",
    ),
    Mutant(
        "engine/kv/place.py",
        "if spec.kv_tokens is None:",
        "if True:",
        "a model that was promised memory of its own borrows",
    ),
    Mutant(
        "edge_router/session.py",
        "len(self._entries) <= self._max_entries and self._entries[oldest].holders[0].expires_at > now",
        "len(self._entries) <= self._max_entries",
        "what sites were said to hold an hour ago is believed",
    ),
    Mutant(
        "runtime/functions/host/faults.py",
        'if not line.startswith("  "):\n            is_skipping = False',
        'if not line.startswith("  "):\n            is_skipping = True',
        "of the threads behind the first an author sees nothing",
    ),
    Mutant(
        "edge_router/durable.py",
        "await self.journal.keep(entry)",
        "pass",
        "a stream that was promised is gone with its router",
    ),
    Mutant(
        "engine/sequence.py",
        "self.share = 0",
        "pass",
        "a preempted sequence is looked for on the rank that it has left",
    ),
    Mutant(
        "runtime/functions/channel/failure.py",
        "if isinstance(error, Failure):",
        "if False:",
        "where a function failed is not told",
    ),
    Mutant(
        "engine/kv/peers/peer_thread.py",
        "poller.register(self._woken, zmq.POLLIN)",
        "pass",
        "a fetch is begun when another one is answered",
    ),
    Mutant(
        "runtime/functions/host/isolate_process.py",
        "self.child is not None and self.child.pidfd >= 0",
        "self.child is not None",
        "what is dead is watched, and ended once more",
    ),
    Mutant(
        "runtime/functions/bindings/owners.py",
        'options.get("props")',
        "False",
        "a function says to another whatever it likes, in the site's name",
    ),
    Mutant(
        "wire/usage.py",
        "use[:4]",
        "use[:5]",
        "a router cannot read what was used",
    ),
    Mutant(
        "runtime/functions/host/egress.py",
        '"sec-websocket-key" in request.headers',
        '"sec-websocket-key" not in request.headers',
        "a socket's handshake is led elsewhere",
    ),
    Mutant(
        "kernels/sample.py",
        "last < candidates",
        "last <= candidates",
        "a nucleus larger than what was looked at ends there",
    ),
    Mutant(
        "engine/kv/error_backoff.py",
        "self.num_errors += 1",
        "pass",
        "errors of a tier are not counted",
    ),
    Mutant(
        "edge_router/finetunes.py",
        "loop.time() + TRY_AGAIN_S",
        "loop.time() - TRY_AGAIN_S",
        "sites are asked for their fine-tunes without a pause",
    ),
    Mutant(
        "runtime/functions/bindings/r2_s3.py",
        'raise R2Error(sentence, 10003, 502, "store_unauthorized") from None\n    if error.code == "NoSuchBucket":',
        'raise R2Error(sentence, 10003, 502, "store_unauthorized") from None\n    if False:',
        "a bucket that is not there is a fault of the store's",
    ),
    Mutant(
        "engine/waiting.py",
        "self.awaiting.add(awaited)",
        "pass",
        "a sample that awaits its grammar is lost behind its leader",
    ),
    Mutant(
        "engine/kv/slot_file.py",
        "num_read == self._slot_bytes and self._holds",
        "num_read == self._slot_bytes or self._holds",
        "a block that was overwritten while it was read is taken",
    ),
)
