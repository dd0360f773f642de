/* The shared table: hash, claim, decide, swap.  Plain C, no Python.h; loaded with ctypes.
 *
 * Layout: told in layout.py.  Guarantees, in short: a key is never allowed more than its policy allows, whatever is
 * interleaved or killed; a denial writes nothing shared; nobody waits for anybody.
 *
 * How they are kept:
 *   - A slot is the pair (fingerprint, state) and changes only by a 16-byte compare-and-swap of the whole pair, so a
 *     slot that was reclaimed for another key can never take a hit that was meant for the key before.
 *   - A key enters the table in three steps: reserve a slot, scan its candidates once more, commit.  The second scan
 *     makes two workers that meet a new key at once agree on one slot.
 *   - Whoever forgets a state (takes its slot) first publishes when that state had expired: the watermark.  A fresh
 *     state is never judged as of an earlier time, so a worker that slept with an old clock reading in its hands can't
 *     grant a forgotten key its quota twice.
 *   - A key that finds no room takes a spare slot, charges it, and then looks once more for a slot among the others.
 *   - Every loop is bounded; past the bound the caller gets CONTENDED and nothing was charged.
 *
 * Memory order: every swap is a full barrier (the __sync builtins are), and looks are sequentially consistent loads.
 * What a swap published before it (the watermark) is therefore visible to everyone who saw the swap's result.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/types.h>

#include "_share.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- deciding ------------------------------------------------------------------------------------------------------ */

EXPORT int shmlimit_take(struct call *call, const unsigned char *key, int length, int cost) {
    struct request r = request(call, key, length, cost, TAKE);
    return decide(&r);
}

/* The same for a cost of 1.  PERF: an argument less for ctypes, 25 ns. */
EXPORT int shmlimit_take_one(struct call *call, const unsigned char *key, int length) {
    return shmlimit_take(call, key, length, 1);
}

EXPORT int shmlimit_peek(struct call *call, const unsigned char *key, int length, int cost) {
    struct request r = request(call, key, length, cost, PEEK);
    return decide(&r);
}

/* A take that may be given back, and isn't counted before it is known to stand. */
EXPORT int shmlimit_charge(struct call *call, const unsigned char *key, int length, int cost) {
    struct request r = request(call, key, length, cost, CHARGE);
    return decide(&r);
}

/* Gives a charge back, from the same `struct call`; 1 when it was.  What can't be given back stays charged. */
EXPORT int shmlimit_give_back(struct call *call, const unsigned char *key, int length, int cost) {
    uint64_t charged = call->charged;
    int in_spare = call->in_spare;
    struct request r = request(call, key, length, cost, PEEK); /* which forgets the charge */
    if (in_spare)
        r = spare_of(&r, r.as_of_us);
    call->charged = charged;
    return undo(&r);
}

/* Counts decisions that were made of charges. */
EXPORT void shmlimit_count(const struct table *t, int allowed, int denied, int shared, int full) {
    add(&t->lane->allowed, (uint64_t)allowed);
    add(&t->lane->denied, (uint64_t)denied);
    add(&t->lane->shared, (uint64_t)shared);
    add(&t->lane->full, (uint64_t)full);
}

/* Forgets a live state on request: 1 when there was one.  No watermark: a reset is meant to grant the quota anew.  Not while
 * the key has a state in a spare slot as well: it would begin with that, and what is being moved can't be taken out. */
EXPORT int shmlimit_reset(struct call *call, const unsigned char *key, int length) {
    struct request r = request(call, key, length, 0, PEEK);
    uint64_t spare;
    int status = read_spare(&r, &spare);
    if (status < 0 || (spare && expiry_us(spare) > r.asked_us))
        return status;
    while (may_try(&r)) {
        struct found f = find(r.bucket, r.fingerprint, 0);
        if (!f.slot || f.reserved || expiry_us(f.state) <= r.asked_us)
            return 0;
        if (swap_pair(f.slot, r.fingerprint, f.state, 0, 0))
            return 1;
        lost(&r);
    }
    return CONTENDED;
}

/* ---- around it ----------------------------------------------------------------------------------------------------- */

/* The version of this interface, negative where the machine has no 16-byte compare-and-swap. */
EXPORT int shmlimit_abi(void) { return HAVE_PAIR_CAS ? ABI : -ABI; }

/* Unix time minus the table clock, now: what a creator stores as the clock offset. */
EXPORT int64_t shmlimit_clock_offset_us(void) {
    struct timespec wall;
    struct header zero;
    zero.clock_offset_us = 0;
    clock_gettime(CLOCK_REALTIME, &wall);
    return (int64_t)wall.tv_sec * 1000000 + wall.tv_nsec / 1000 - clock_us(&zero);
}

EXPORT int64_t shmlimit_now_us(const struct table *t) { return clock_us(t->header); }

/* Derives the SipHash key of a policy's fingerprints from the table's secret and the policy's identity. */
EXPORT void shmlimit_subkey(struct policy *p, const unsigned char *identity, int length) {
    const struct header *header = p->table->header;
    uint64_t other[2] = {~header->secret[0], ~header->secret[1]};
    p->key[0] = siphash(header->secret, identity, (size_t)length);
    p->key[1] = siphash(other, identity, (size_t)length);
}

EXPORT uint64_t shmlimit_siphash(const uint64_t key[2], const unsigned char *data, int length) {
    return siphash(key, data, (size_t)length);
}

/* Chooses the counter line of process `pid`: its own, else one that nobody alive owns, else one that it shares.  A
 * process of another pid namespace may be taken for gone: sharing a line loses nothing, since counters are added to. */
EXPORT void shmlimit_choose_lane(struct table *t, int64_t pid) {
    struct lane *lanes = t->header->lanes;
    for (int i = 0; i < LANES; i++)
        if (look(&lanes[i].owner) == (uint64_t)pid) {
            t->lane = &lanes[i];
            return;
        }
    for (int i = 0; i < LANES; i++) {
        uint64_t owner = look(&lanes[i].owner);
        int gone = owner == 0 || owner > INT32_MAX || (kill((pid_t)owner, 0) != 0 && errno == ESRCH);
        if (gone && swap_word(&lanes[i].owner, owner, (uint64_t)pid)) {
            t->lane = &lanes[i];
            return;
        }
    }
    t->lane = &lanes[(uint64_t)pid % LANES];
}

/* How many of `n` slots from `slot` on hold a state that is live as of `now_us`. */
EXPORT uint64_t shmlimit_count_live(const struct slot *slot, uint64_t n, int64_t now_us) {
    uint64_t live = 0;
    for (; n > 0; n--, slot++) {
        uint64_t state = look(&slot->state);
        live += state != 0 && !is_reserved(state) && expiry_us(state) > now_us;
    }
    return live;
}

/* Sizes and offsets of the layout, for the test that compares them with layout.py. */
EXPORT int shmlimit_layout(uint64_t *out) {
    const uint64_t layout[] = {
        sizeof(struct header), sizeof(struct slot), BUCKET, CANDIDATES, LANES, sizeof(struct lane),
        offsetof(struct header, magic), offsetof(struct header, version), offsetof(struct header, header_bytes),
        offsetof(struct header, slots), offsetof(struct header, spare_slots), offsetof(struct header, secret),
        offsetof(struct header, clock_offset_us), offsetof(struct header, watermark_us),
        offsetof(struct header, spare_until_us), offsetof(struct header, lanes),
    };
    memcpy(out, layout, sizeof layout);
    return (int)(sizeof layout / sizeof *layout);
}
