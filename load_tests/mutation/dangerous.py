"""Sixty changes where a mistake costs a user a wrong answer, lost data, money or an open door. The tests noticed 41 when they were first tried; the
others have tests of their own since.

The rooms, by rule: what decides which sequence computes which tokens in which blocks, and what is told of them (engine/scheduler.py, preemption.py,
in_flight.py, publishing.py, sampling.py, token_counts.py, validation.py); what says that a block holds what its name says, on the device, in
memory and on disk (engine/kv/); what passes an answer on, goes on with it elsewhere or keeps it (edge_router/); what counts and bills
(edge_router/quotas/, ledger/, wire/meters.py, usage.py); what reads strangers' bytes, keys and signatures (wire/, runtime/middleware.py,
router_context.py, admission.py, sites/); and what confines functions. Tuning constants, logs and the words of messages are no part of it.

The files were drawn from these rooms in an order given by a seed, and in each a statement; the change is at that statement or, where it only keeps
a value or words a message, in the function or class that uses it. Whoever chose them from the code had read the tests of some of these files.
"""

from load_tests.mutation.mutant import Mutant

DANGEROUS = (
    Mutant(
        "edge_router/data_places.py",
        "not (self._accounts or self._models)",
        "not (self._accounts and self._models)",
        "a rule for models alone keeps no data anywhere",
    ),
    Mutant("wire/usage.py", "max(0, mine - theirs)", "mine - theirs", "a count of what was used is below zero"),
    Mutant(
        "engine/publishing.py",
        "for token in chosen:  # behind",
        "for token in chosen[:1]:  # behind",
        "what is not finite behind a refused draft stays in the cache",
    ),
    Mutant(
        "engine/kv/cached_prefix.py",
        "return sequence.block_hashes[: self.num_sharable(sequence)]",
        "return sequence.block_hashes",
        "nothing is left of a cached prompt to choose the next token by",
    ),
    Mutant(
        "edge_router/relay.py",
        "device_us + point.device_us,",
        "point.device_us,",
        "the time of devices at sites that were lost is nobody's",
    ),
    Mutant(
        "edge_router/upstream.py",
        "            await self._drain()\n",
        "",
        "no connection to a site is used again behind a stream",
    ),
    Mutant(
        "engine/in_flight.py",
        "counts.followed_by(drafts[:i])",
        "counts.entries",
        "penalties do not count the drafts before a draft",
    ),
    Mutant(
        "edge_router/durable.py",
        'self._admission.access.holder(client.head.header("authorization"))',
        "self._admission.access.find(client.head.key)",
        "a stream is read without the key that is required",
    ),
    Mutant(
        "runtime/functions/host/isolate_work.py",
        "SOCKETS_SHARE * (now - self._charged_at)",
        "SOCKETS_SHARE * now",
        "open sockets may use all of the processor time",
    ),
    Mutant(
        "edge_router/downstream.py",
        "while more and size <= limit:",
        "while more:",
        "a body without a length is held whole, however large it is, before it is refused",
    ),
    Mutant(
        "runtime/functions/bindings/owners.py",
        '        if consumer.dead_letter_queue:\n            yield "queue", consumer.dead_letter_queue\n',
        "",
        "a function's dead letters may go to another's queue",
    ),
    Mutant(
        "engine/kv/block_pool.py",
        "            heappush(self._share_of(block).free, block)\n            self.num_blocks += 1",
        "            self._share_of(block).free.append(block)\n            self.num_blocks += 1",
        "blocks that are lent are not handed out from below, and slabs do not come free",
    ),
    Mutant(
        "engine/kv/host_tier.py",
        "lock_directory(directory, patience_s)",
        "lock_directory(directory)",
        "a host that starts does not wait for the one before to let go of the tier",
    ),
    Mutant(
        "edge_router/quotas/lease_store.py",
        "LeaseGrant(held, free - held)",
        "LeaseGrant(held, free)",
        "a router takes what it was just given for free as well",
    ),
    Mutant(
        "edge_router/event_buffer.py",
        "        self._changed.set()\n        self._changed = asyncio.Event()",
        "        self._changed.set()",
        "a reader that waits for a stream turns round and round",
    ),
    Mutant(
        "engine/kv/connector.py",
        "self.num_tokens = len(sequence.token_ids) - prefix.num_blocks * connector.groups.block_size",
        "self.num_tokens = len(sequence.token_ids)",
        "what is being fetched counts as work of the queue",
    ),
    Mutant(
        "sites/accounts.py",
        "(key.key_sha256, key.former_sha256)",
        "(key.key_sha256,)",
        "one account's rotated key may be another account's",
    ),
    Mutant(
        "wire/meters.py",
        "OPEN + 1 + OUTCOMES.index(outcome)",
        "OPEN + OUTCOMES.index(outcome)",
        "a whole answer is taken for one that its router died with",
    ),
    Mutant(
        "edge_router/silence.py",
        "awake_since = looked_at",
        "awake_since = before",
        "a site is left for what this router slept through",
    ),
    Mutant(
        "engine/kv/lease.py",
        "False, 0, next(slabs.schedules)",
        "False, 0, 0",
        "the idle model that was used last gives its blocks first",
    ),
    Mutant(
        "edge_router/ledger/accounting.py",
        "quotas.recovered(request.account, request.started_s, used.prompt + used.output, cost or 0)",
        "quotas.recovered(request.account, request.started_s, used.output, cost or 0)",
        "the prompts that a killed router was at work on are not told to other routers",
    ),
    Mutant(
        "edge_router/quotas/daily.py",
        "        for part in parts:\n            part.lease.begin(part.amount)\n        return Reserved",
        "        return Reserved",
        "what is at work is given once more by other routers",
    ),
    Mutant(
        "edge_router/ledger/ledger.py",
        '        """Return sums, with all that has ended. Raises ApiError."""\n        await self.flush()\n',
        '        """Return sums, with all that has ended. Raises ApiError."""\n',
        "a bill lacks what has just ended",
    ),
    Mutant(
        "wire/http/middleware.py",
        "if size and self.held_bytes > self._max_bytes:",
        "if size and held_bytes > self._max_bytes:",
        "many bodies fill the memory of which none is too large",
    ),
    Mutant(
        "runtime/functions/host/subrequests.py",
        "answer = await self._handler(frame, body)",
        "answer = await self._handler(frame, None)",
        "what a function streams to a store is not written",
    ),
    Mutant(
        "runtime/router_context.py",
        "return [*super().headers(), (QUEUE, str(self.queued_tokens))]",
        "return [(QUEUE, str(self.queued_tokens))]",
        "a site that declines is not believed by its router",
    ),
    Mutant(
        "engine/validation.py",
        "sampling.top_k is not None and sampling.top_k < 1",
        "sampling.top_k is not None and sampling.top_k < 0",
        "no token may be chosen, and one is",
    ),
    Mutant(
        "engine/scheduler.py",
        "self._reserve(sequence, len(sequence.token_ids) + len(drafts))",
        "self._reserve(sequence, len(sequence.token_ids))",
        "drafts are written behind the end of a block table",
    ),
    Mutant(
        "engine/kv/manager.py",
        "known = sequence.token_ids[:num_tokens]",
        "known = sequence.token_ids",
        "a block has the name of tokens that are not known yet",
    ),
    Mutant(
        "wire/continuation.py",
        "int(found[1]) >= 2**63",
        "int(found[1]) > 2**63",
        "a seed that no engine takes ends the request inside the site",
    ),
    Mutant(
        "engine/preemption.py",
        "return bool(self._running or self._waiting)",
        "return bool(self._running)",
        "a model whose sequences all wait has no share of the arena",
    ),
    Mutant(
        "edge_router/proxied.py",
        'return ApiError("upstream_lost", sentence)',
        'return ApiError("internal_error", sentence)',
        "a stream that nobody could go on with is called a fault of the router",
    ),
    Mutant(
        "edge_router/ledger/store.py",
        "AND started_s < {mark}",
        "AND started_s <= {mark}",
        "what began at midnight is on the bills of two days",
    ),
    Mutant(
        "engine/kv/segment_file.py",
        "if written < len(header) + len(block):",
        "if written < len(block):",
        "a block that a full disk has cut is taken for whole",
    ),
    Mutant(
        "wire/headers.py",
        'named += value + ","',
        'named = value + ","',
        "of several connection headers the last one alone counts",
    ),
    Mutant(
        "wire/http/connection.py",
        "if exchange.has_begun or exchange is not self._incoming:",
        "if exchange.has_begun:",
        "a refusal is read as the answer to the request before",
    ),
    Mutant(
        "runtime/functions/host/confinement.py",
        "if not parent.stat().st_mode & 0o001:",
        "if not parent.stat().st_mode & 0o010:",
        "a function cannot read its interpreter where others may not enter a folder above it",
    ),
    Mutant(
        "wire/http/exchange.py",
        "if len(lengths) > 1 or (lengths and not lengths[0].isdigit()):",
        "if lengths and not lengths[0].isdigit():",
        "an answer has two lengths, and two readers read two answers",
    ),
    Mutant(
        "wire/sse.py",
        "self._scanned = max(0, len(self._buffer) - 3)",
        "self._scanned = len(self._buffer)",
        "an event whose end comes in two pieces ends with the next one",
    ),
    Mutant(
        "runtime/functions/host/answer_headers.py",
        "            if length is not None:\n                continue\n",
        "",
        "a function's answer names its length twice",
    ),
    Mutant(
        "edge_router/admission.py",
        "_PLAIN_TARGET.fullmatch(head.target)",
        "_PLAIN_TARGET.match(head.target)",
        "a target may hold line ends, which end the head that a site gets",
    ),
    Mutant(
        "engine/kv/tiered_cache.py",
        "TierRead | StoreLookup)\n            transfer.cancel()\n",
        "TierRead | StoreLookup)\n",
        "what a read brings for nobody stays pinned",
    ),
    Mutant(
        "edge_router/ledger/site_usage.py",
        "        self._accounting.count(told.records)\n",
        "",
        "what functions use is on the bill and in no quota",
    ),
    Mutant(
        "edge_router/selection.py",
        "len(tries.failures) + 1 >= self._config.max_tries",
        "len(tries.failures) >= self._config.max_tries",
        "a request leaves its last site for a try that it does not have",
    ),
    Mutant(
        "wire/credentials.py",
        "if self.expires_s is not None and now_s >= self.expires_s:\n            when",
        "if self.expires_s is not None and now_s > self.expires_s:\n            when",
        "a key is good for a moment beyond its end",
    ),
    Mutant(
        "edge_router/site_failure.py",
        "status not in SPENT_STATUSES",
        "status < 500",
        "a site's own words about a request are thrown away with a 500 or a 501",
    ),
    Mutant(
        "edge_router/quotas/shared.py",
        "return self.held - self.at_work - self.spent if",
        "return self.held - self.spent if",
        "what is at work is given a second time",
    ),
    Mutant(
        "edge_router/ledger/sqlite_store.py",
        "if self._connection is not None and self._inode != _inode(self._path):",
        "if self._connection is not None and not self._path.exists():",
        "records go into a database that was moved away",
    ),
    Mutant(
        "wire/http/request.py",
        "self._events, self._num_open = [], num_open",
        "self._events, self._num_open = [], 0",
        "a client may send any number of requests ahead of their answers",
    ),
    Mutant(
        "engine/kv/block_table.py",
        "            self.generations[:first] = self.generations[first : first + 1] * first\n",
        "",
        "a sequence ends for a block that it has given back itself",
    ),
    Mutant(
        "edge_router/proxy.py",
        "            limits.charge(request.head, proxied.delivered_tokens)\n",
        "",
        "answers are taken off nobody's tokens a minute",
    ),
    Mutant(
        "engine/kv/disk_tier.py",
        "does not agree with its checksum; it is recomputed\", record.segment.path)\n            self.forget([block_hash])\n",
        "does not agree with its checksum; it is recomputed\", record.segment.path)\n",
        "a damaged block is read again and again",
    ),
    Mutant(
        "edge_router/session.py",
        "Prefix(link[:DIGEST_BYTES], size // 4, is_telling)",
        "Prefix(link[:DIGEST_BYTES], size // 4)",
        "all conversations with one system prompt live at one site",
    ),
    Mutant(
        "edge_router/journal.py",
        "await asyncio.sleep(min(SWEEP_S, keep_s))",
        "await asyncio.sleep(SWEEP_S)",
        "streams that are to be kept for seconds are kept for half a minute",
    ),
    Mutant(
        "engine/token_counts.py",
        "self._counts_output = self._counts_prompt or bool(",
        "self._counts_output = bool(",
        "a repetition penalty does not see what was put out",
    ),
    Mutant(
        "runtime/functions/host/egress.py",
        'parts.port or (443 if parts.scheme == "https" else 80)',
        "parts.port or 80",
        "what is allowed at port 443 is denied, and what is allowed at 80 is reached at 443",
    ),
    Mutant(
        "runtime/middleware.py",
        "if age_s is None or not headers.hop_is_genuine(signature, self._hop_secret, time.time() - age_s, hop):",
        "if age_s is None:",
        "whoever sends a number is told the site's time, signed for a router",
    ),
    Mutant(
        "runtime/admission.py",
        "        self.inflight += 1\n        self._empty.clear()\n",
        "        self.inflight += 1\n",
        "a site ends while requests are at work",
    ),
    Mutant(
        "engine/kv/tier_read.py",
        "            self.is_done = True\n            if self.is_cancelled:\n                self._host.unpin(self.slots)\n",
        "            self.is_done = True\n",
        "what comes too late for its sequence stays pinned",
    ),
    Mutant(
        "edge_router/ledger/prices.py",
        "price.valid_from.timestamp() <= at_s",
        "price.valid_from.timestamp() < at_s",
        "the first moment of a price is billed at the one before",
    ),
)  # fmt: skip
