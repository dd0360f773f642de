"""Lines of the C code done wrong, one at a time, and the scenario in which the driver must find what breaks.

Kinds of breaches:

- `more`: a key was allowed more than its limit
- `less`: a key was denied, or told that there is no room, for no reason
- `twice`: a key has two slots
- `lost`: a state isn't that of the kept requests
- `wrote`: something was changed that must not be
- `answer`: a call had no answer, or a peek had a wrong one
- `left`: a reservation was left behind
- `endless`: takers don't come to an end
"""

from __future__ import annotations

from typing import NamedTuple


class Sabotage(NamedTuple):
    file: str
    old: str  # occurs once
    new: str
    kind: str
    scenario: str
    more: int = 0  # preemptions than the scenario has


NEW_KEY = "two takers meet a new key"
THREE = "three takers meet a new key"
FORGOTTEN = "a key is forgotten and comes back with an old clock"
PASSES = "a slot passes to another key under the hands"
HITS = "two hits on one slot"
FREE = "a slot gets free while its key shares"

SABOTAGES = {
    "no second scan by the maker of a reservation": Sabotage(
        "_claim.h",
        "        seen = made;\n",
        "        status = made.slot ? commit(r, &made) : AGAIN;\n"
        "        if (status != AGAIN)\n"
        "            return status;\n",
        "more",
        NEW_KEY,
    ),
    "no second scan by one who sees another's reservation": Sabotage(
        "_claim.h", "if (seen.slot == f.slot && seen.state == f.state)", "if (1)", "more", THREE
    ),
    "several reservations, the first is committed and none is cleared": Sabotage(
        "_claim.h",
        "                f.several = 1;\n"
        "                if (clear)\n"
        "                    swap_pair(slot, fingerprint, state, 0, 0);\n",
        "",
        "more",
        "two takers of a new key choose different slots",
    ),
    "several reservations, and none is cleared": Sabotage(
        "_claim.h",
        "                if (clear)\n                    swap_pair(slot, fingerprint, state, 0, 0);\n",
        "",
        "endless",
        NEW_KEY,
    ),
    "of several reservations, the first is committed at once": Sabotage(
        "_claim.h",
        "        if (f.several && r->writes)\n            continue;\n",
        "",
        "more",
        "two takers of a new key choose different slots",
    ),
    "the watermark is lowered": Sabotage(
        "_memory.h",
        "if (old >= value || swap_word(word, old, value))",
        "if (swap_word(word, old, value))",
        "wrote",
        "three takers of a new key choose different slots",
    ),
    "a new key's charge is given back to its reservation": Sabotage(
        "_claim.h",
        "r->call->before = f->reserved ? 0 : f->state;",
        "r->call->before = f->state;",
        "wrote",
        "a new window is charged and given back",
    ),
    "a spare reservation is left behind": Sabotage(
        "_claim.h",
        "if (made.slot && made.slot != f.slot)",
        "if (0)",
        "left",
        NEW_KEY,
    ),
    "all reservations are alike": Sabotage(
        "_claim.h",
        "ms << 19 | lane << 13 | (n & 8191)",
        "ms << 19 | (lane & n & 0)",
        "more",
        "three takers of a new key choose different slots",
    ),
    "a pair is stored as two words": Sabotage(
        "_memory.h",
        "    return __sync_bool_compare_and_swap((pair *)slot, from, to);",
        "    (void)from, (void)to;\n"
        "    if (slot->fingerprint != fingerprint || !swap_word(&slot->state, state, to_state))\n"
        "        return 0;\n"
        "    YIELD(&slot->fingerprint);\n"
        "    slot->fingerprint = to_fingerprint;\n"
        "    return 1;",
        "more",
        "a slot passes to another key and back",
    ),
    "a swap compares the state alone": Sabotage(
        "_claim.h",
        "if (!swap_pair(f->slot, r->fingerprint, f->state, r->fingerprint, to))",
        "if (!swap_word(&f->slot->state, f->state, to))",
        "wrote",
        "a slot passes to another key and back",
    ),
    "a hit is stored": Sabotage(
        "_claim.h",
        "if (!swap_pair(f->slot, r->fingerprint, f->state, r->fingerprint, to))",
        "if (look(&f->slot->state) && (f->slot->state = to) != to)",
        "more",
        HITS,
    ),
    "forgotten without a word": Sabotage(
        "_claim.h",
        "!raise_word(&r->table->header->watermark_us, (uint64_t)expiry_us(room->state))",
        "0",
        "more",
        FORGOTTEN,
    ),
    "forgotten first, and published afterwards": Sabotage(
        "_claim.h",
        "        !raise_word(&r->table->header->watermark_us, (uint64_t)expiry_us(room->state)))\n"
        "        return CONTENDED;\n"
        "    uint64_t word = reserve(r->table, room, r->fingerprint);\n",
        "        0)\n"
        "        return CONTENDED;\n"
        "    uint64_t word = reserve(r->table, room, r->fingerprint);\n"
        "    if (word && room->state && !is_reserved(room->state))\n"
        "        raise_word(&r->table->header->watermark_us, (uint64_t)expiry_us(room->state));\n",
        "more",
        FORGOTTEN,
    ),
    "a fresh state is judged as of the clock alone": Sabotage(
        "_claim.h",
        "int64_t as_of_us = raised_us(r);\n    status = judge",
        "int64_t as_of_us = r->as_of_us;\n    status = judge",
        "more",
        FORGOTTEN,
    ),
    "a live state is evicted": Sabotage(
        "_claim.h",
        "if (since > now_us) {",
        "if (since > now_us + 1000000) {",
        "wrote",
        "a key is forgotten and comes back with an old clock",
    ),
    "a reservation of now is taken for a dead one": Sabotage(
        "_claim.h", "if (age_ms < RESERVED_MS &&", "if (age_ms < 0 &&", "wrote", "a taker sleeps on its reservation"
    ),
    "a dead reservation holds for ever": Sabotage(
        "_claim.h",
        "if (age_ms < RESERVED_MS &&",
        "if (age_ms < 1000 * RESERVED_MS &&",
        "less",
        "a dead taker left a reservation long ago",
    ),
    "a denial isn't confirmed": Sabotage(
        "_claim.h",
        "    return look(&f->slot->fingerprint) == r->fingerprint && look(&f->slot->state) == f->state;",
        "    return r == 0 || f->slot != 0;",
        "less",
        PASSES,
    ),
    "a denial is confirmed by its state alone": Sabotage(
        "_claim.h",
        "    return look(&f->slot->fingerprint) == r->fingerprint && look(&f->slot->state) == f->state;",
        "    return r != 0 && look(&f->slot->state) == f->state;",
        "less",
        PASSES,
    ),
    "a state of another kind is no answer, also when it is another key's": Sabotage(
        "_claim.h",
        "return is_unchanged(r, f) ? CORRUPT : AGAIN;",
        "return CORRUPT;",
        "answer",
        "a slot passes to a key of another kind",
    ),
    "a peek takes": Sabotage(
        "_claim.h", "r.writes = mode != PEEK && cost > 0", "r.writes = cost > 0", "wrote", "a peek meets a new key"
    ),
    "no room is said without another look for the key": Sabotage(
        "_share.h",
        "        return is_there(r->bucket, r->fingerprint) ? AGAIN : status;",
        "        return status;",
        "less",
        "the key itself gets the last slot meanwhile",
    ),
    "the look for the key goes the way of the scan": Sabotage(
        "_claim.h",
        "for (int i = CANDIDATES * BUCKET; i-- > 0;)",
        "for (int i = 0; i < CANDIDATES * BUCKET; i++)",
        "less",
        "three takers of a new key choose different slots",
    ),
    "all is given back, whatever the state": Sabotage(
        "_policies.h",
        "return state == call->charged ? gcra_word",
        "return 1 ? gcra_word",
        "more",
        "two charge and give back",
    ),
    "a window that another opened is emptied": Sabotage(
        "_policies.h",
        "(newer == units && !call->before)",
        "newer == units",
        "more",
        "a spent window is left, and it is given back",
    ),
    "the window before isn't given back": Sabotage(
        "_policies.h",
        "    if (state == call->charged && call->before)\n        return call->before;\n"
        "    if (end == charged_end && (newer > units || (newer == units && !call->before)))",
        "    if (end == charged_end && newer >= units)",
        "more",
        "a spent window is left, and it is given back",
    ),
    "a charge is given back by a store": Sabotage(
        "_share.h",
        "if (swap_pair(f.slot, r->fingerprint, f.state, r->fingerprint, to))",
        "if (look(&f.slot->state) && (f.slot->state = to) == to)",
        "more",
        "two charge and give back",
    ),
    "a reset empties the slot, whoever has it": Sabotage(
        "_table.c",
        "if (swap_pair(f.slot, r.fingerprint, f.state, 0, 0))",
        "if (swap_pair(f.slot, f.slot->fingerprint, f.slot->state, 0, 0))",
        "wrote",
        "a reset races a slot that passes to another key",
    ),
    "spare slots are in use, and it isn't published": Sabotage(
        "_claim.h", "if (is_spare(r) && !raise_word", "if (0 && !raise_word", "more", FREE
    ),
    "a claimer doesn't read the spare slot": Sabotage(
        "_claim.h", "int status = read_spare(r, &from);", "int status = 0;\n    from = 0;", "more", FREE
    ),
    "a claimer reads the spare slot before it reserves, not after": Sabotage(
        "_claim.h",
        "    int status = fresh(r, &to);\n    if (status < 0)\n        return status;\n    if (r->call->allowed) {",
        "    int status = judge(r->call, 0, raised_us(r), r->asked_us, r->cost, &to);\n    if (r->call->allowed) {",
        "more",
        FREE,
    ),
    "a claimer reads the watermark before the spare slot": Sabotage(
        "_claim.h",
        "    int status = read_spare(r, &from);\n"
        "    if (status < 0)\n"
        "        return status;\n"
        "    int64_t as_of_us = raised_us(r);\n",
        "    int64_t as_of_us = raised_us(r);\n"
        "    int status = read_spare(r, &from);\n"
        "    if (status < 0)\n"
        "        return status;\n",
        "more",
        "a spare slot is forgotten while its key is claimed",
    ),
    "the state of a spare slot isn't confirmed": Sabotage(
        "_claim.h",
        "if (!is_unchanged(&spare, &f))",
        "if (0)",
        "answer",
        "a spare slot is forgotten while its key is claimed",
    ),
    "a spare slot denies a key that has a slot by now": Sabotage(
        "_claim.h",
        "            if (is_there(r->bucket, r->fingerprint))\n                continue;\n            return status;",
        "            return status;",
        "less",
        "a spare slot is spent while its key is claimed",
    ),
    "a charged spare slot, and no look for the key": Sabotage(
        "_share.h", "i < CANDIDATES * BUCKET", "i < 0", "more", FREE
    ),
    "a charged spare slot, and the reservation of the key isn't cleared": Sabotage(
        "_share.h", "if (swap_pair(slot, r->fingerprint, state, 0, 0))", "if (1)", "more", FREE
    ),
    "a charged spare slot, the clearing is lost, and the slot isn't looked at again": Sabotage(
        "_share.h",
        "if (swap_pair(slot, r->fingerprint, state, 0, 0))",
        "if (swap_pair(slot, r->fingerprint, state, 0, 0) || 1)",
        "more",
        FREE,
    ),
    "a charged spare slot, and the watermark isn't looked at again": Sabotage(
        "_share.h",
        "return raised_us(r) <= stamp_us;",
        "return stamp_us != 0;",
        "more",
        "a key that shares is claimed and forgotten meanwhile",
    ),
    "a charged spare slot, and the expired slot of the key isn't counted": Sabotage(
        "_share.h",
        "            if (!is_reserved(state) || !may_try(r))\n",
        "            if (!is_reserved(state) && expiry_us(state) <= stamp_us)\n                break;\n"
        "            if (!is_reserved(state) || !may_try(r))\n",
        "more",
        "a key shares while its slot expires",
    ),
    "a spare slot is judged as of the clock alone": Sabotage(
        "_share.h",
        "struct request spare = spare_of(r, raised_us(r));",
        "struct request spare = spare_of(r, r->asked_us);",
        "endless",
        "a key that shares is claimed and forgotten meanwhile",
    ),
    "a charge that doesn't stand alone is allowed": Sabotage(
        "_share.h",
        "    undo(&spare);\n    r->call->charged = 0;\n    return AGAIN;\n",
        "    return status;\n",
        "more",
        FREE,
    ),
}
