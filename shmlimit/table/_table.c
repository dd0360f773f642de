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
 *   - Every loop is bounded; past the bound the caller gets CONTENDED and nothing was charged.
 *
 * Memory order: every swap is a full barrier (the __sync builtins are), and looks are sequentially consistent loads.
 * What a swap published before it (the watermark) is therefore visible to everyone who saw the swap's result.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define ABI 1

#if defined(__SIZEOF_INT128__) && (defined(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16) || defined(__aarch64__)) && \
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAVE_PAIR_CAS 1
#else
#define HAVE_PAIR_CAS 0
#endif

/* CLOCK_BOOTTIME counts while the machine sleeps, as people expect of a limit; both clocks are one for all processes. */
#ifdef CLOCK_BOOTTIME
#define TABLE_CLOCK CLOCK_BOOTTIME
#else
#define TABLE_CLOCK CLOCK_MONOTONIC
#endif

enum { BUCKET = 8, CANDIDATES = 3, LANES = 60 };
enum { TRIES = 10000 };                    /* lost swaps in one call; a test that gets near it has found a bug */
enum { RESERVED_MS = 1000 };               /* so long others leave a reservation alone: its maker may have died */
#define NOW_MAX_US INT64_C(4133980800000000) /* 2101-01-01: with ten years on top it still fits 52 bits */

/* ---- the layout in shared memory (layout.py tells it; a test compares the two) ---------------------------------- */

struct slot {
    _Alignas(16) uint64_t fingerprint;     /* 0: empty */
    uint64_t state;                        /* self-describing: see expiry_us() */
};

struct lane {                              /* one process's counters; only added to, so sharing one loses nothing */
    _Alignas(128) uint64_t owner;          /* process id, 0: nobody's */
    uint64_t allowed, denied, shared, full, reclaimed, contended;
    uint64_t nonces;                       /* reservations made through this lane */
};

struct header {
    uint64_t magic;                        /* written last */
    uint32_t version, header_bytes;
    uint64_t slots, group_slots;
    uint64_t secret[2];
    int64_t clock_offset_us;               /* table clock + this = Unix time */
    _Alignas(64) uint64_t watermark_us;    /* the latest expiry of anything that was forgotten */
    _Alignas(64) uint64_t shared_until_us; /* group states are in use until then */
    _Alignas(512) struct lane lanes[LANES];
};

_Static_assert(sizeof(struct slot) == 16 && sizeof(struct lane) == 128, "sizes are part of the layout");
_Static_assert(offsetof(struct header, lanes) == 512 && sizeof(struct header) == 8192, "two pages");

/* ---- what the Python side prepares, in its own memory ----------------------------------------------------------- */

struct table {                             /* one per attached table */
    struct header *header;
    struct slot *slots;
    struct lane *lane;                     /* this process's; chosen again after a fork */
    uint64_t buckets;
};

struct policy {                            /* one per table and policy: all that is constant for it */
    struct table *table;
    uint64_t key[2];                       /* SipHash key of its fingerprints, from the secret and its identity */
    int64_t quota;
    int64_t denominator;                   /* times are counted in 1/denominator microseconds: d */
    int64_t interval;                      /* emission interval T in 1/d us, rounded up where d is capped */
    int64_t tolerance;                     /* quota * interval */
};

struct call {                              /* one per call under way; never shared between two threads */
    const struct policy *policy;
    int64_t now_us;                        /* the caller's time, or -1: the table's clock */
    uint8_t allowed;                       /* from here on: the answer, in the order of Decision */
    int64_t limit, remaining, reset_us, retry_after_us, next_us;
};

/* What take and peek return. AGAIN stays inside: the slot changed under the hands, look again. */
enum { ANSWERED = 0, NEVER = 1, CONTENDED = -1, CORRUPT = -2, AGAIN = -3 };

/* ---- shared memory is touched only through these ----------------------------------------------------------------- */

/* Sequentially consistent, not just acquire: no look of a second scan may pass the swap that reserved.  Costs nothing on
 * x86-64, and on arm64 it is `ldar`, where acquire may be `ldapr`, which can pass a store. */
static inline uint64_t look(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static inline void add(uint64_t *word, uint64_t n) { __atomic_fetch_add(word, n, __ATOMIC_RELAXED); }

static inline int swap_word(uint64_t *word, uint64_t from, uint64_t to) {
    return __sync_bool_compare_and_swap(word, from, to);
}

static inline int swap_pair(struct slot *slot, uint64_t fingerprint, uint64_t state, uint64_t to_fingerprint,
                            uint64_t to_state) {
#if HAVE_PAIR_CAS
    typedef unsigned __int128 pair __attribute__((may_alias));
    pair from = (pair)state << 64 | fingerprint, to = (pair)to_state << 64 | to_fingerprint;
    return __sync_bool_compare_and_swap((pair *)slot, from, to);
#else
    (void)slot, (void)fingerprint, (void)state, (void)to_fingerprint, (void)to_state;
    return 0;
#endif
}

/* Raises a word to `value`.  0 when the bound on lost swaps was reached: then nothing may be built on it. */
static int raise_word(uint64_t *word, uint64_t value) {
    for (int i = 0; i < TRIES; i++) {
        uint64_t old = look(word);
        if (old >= value || swap_word(word, old, value))
            return 1;
    }
    return 0;
}

/* ---- hash and time ---------------------------------------------------------------------------------------------- */

static inline uint64_t rotl(uint64_t x, int b) { return x << b | x >> (64 - b); }

static inline void sip_rounds(uint64_t v[4], int n) {
    for (; n > 0; n--) {
        v[0] += v[1], v[1] = rotl(v[1], 13), v[1] ^= v[0], v[0] = rotl(v[0], 32);
        v[2] += v[3], v[3] = rotl(v[3], 16), v[3] ^= v[2];
        v[0] += v[3], v[3] = rotl(v[3], 21), v[3] ^= v[0];
        v[2] += v[1], v[1] = rotl(v[1], 17), v[1] ^= v[2], v[2] = rotl(v[2], 32);
    }
}

/* SipHash-2-4 (Aumasson and Bernstein, 2012): keyed, so nobody outside can make keys that collide. */
static uint64_t siphash(const uint64_t key[2], const unsigned char *data, size_t n) {
    uint64_t v[4] = {key[0] ^ UINT64_C(0x736f6d6570736575), key[1] ^ UINT64_C(0x646f72616e646f6d),
                     key[0] ^ UINT64_C(0x6c7967656e657261), key[1] ^ UINT64_C(0x7465646279746573)};
    uint64_t last = (uint64_t)n << 56, word;
    for (; n >= 8; n -= 8, data += 8) {
        memcpy(&word, data, 8);
        v[3] ^= word;
        sip_rounds(v, 2);
        v[0] ^= word;
    }
    for (size_t i = 0; i < n; i++)
        last |= (uint64_t)data[i] << (8 * i);
    v[3] ^= last;
    sip_rounds(v, 2);
    v[0] ^= last;
    v[2] ^= 0xff;
    sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static int64_t clock_us(const struct header *header) {
    struct timespec t;
    clock_gettime(TABLE_CLOCK, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000 + header->clock_offset_us;
}

/* ---- state words ------------------------------------------------------------------------------------------------- */

static inline int is_reserved(uint64_t state) { return state >> 61 == 0; } /* and not 0, which is empty */

static inline int64_t reserved_ms(uint64_t state) { return (int64_t)(state >> 19); }

/* From when on a committed state equals a fresh one, by the word alone: rounded up where only its owner knows more. */
static int64_t expiry_us(uint64_t state) {
    if (state >> 63)                       /* 1: GCRA */
        return (int64_t)(state >> 11 & ((UINT64_C(1) << 52) - 1)) + ((state & 2047) != 0);
    if (state >> 61 == 2)                  /* 010: fixed window */
        return (int64_t)(state >> 19 & ((UINT64_C(1) << 42) - 1)) * 1000;
    if (state >> 61 == 3)                  /* 011: fixed window of 4 s or more */
        return (int64_t)(state >> 31 & ((UINT64_C(1) << 30) - 1)) * 4000000;
    if (state >> 60 == 2)                  /* 0010: sliding counter */
        return (int64_t)(state >> 18 & ((UINT64_C(1) << 42) - 1)) * 1000;
    return (int64_t)(state >> 28 & UINT32_MAX) * 1000000; /* 0011: sliding counter of 1 s or more */
}

static inline uint64_t gcra_word(int64_t tat, int64_t d) {
    return UINT64_C(1) << 63 | (uint64_t)(tat / d) << 11 | (uint64_t)(tat % d);
}

static inline int64_t gcra_tat(uint64_t state, int64_t d) {
    int64_t fraction = state & 2047;
    return (int64_t)(state >> 11 & ((UINT64_C(1) << 52) - 1)) * d + (fraction < d ? fraction : d - 1);
}

/* ---- deciding ----------------------------------------------------------------------------------------------------- */

static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t up(int64_t n, int64_t d) { return (n + d - 1) / d; } /* n > 0 */

/* The generic cell rate algorithm, as in policies/gcra.py, in 1/d us.  Decides as of `as_of_us`; waits are counted from
 * `asked_us` (<= as_of_us).  Gives the arrival time after the request in *tat, unchanged by a denial.
 * 64 bits are enough: a cost above the quota is decided before it is multiplied, and nothing is added to `tat` before
 * the request is known to fit. */
static int gcra(struct call *call, int64_t *tat, int64_t as_of_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t d = p->denominator, now = as_of_us * d, asked = asked_us * d;
    int64_t from = max64(*tat, now), wait = 0;
    call->allowed = 0;
    if (cost <= p->quota) {
        int64_t early = from - now - (p->tolerance - cost * p->interval);
        if (early > 0) {
            wait = up(early + (now - asked), d);
        } else {
            call->allowed = 1;
            from += cost * p->interval;
            *tat = cost > 0 ? from : *tat;
        }
    }
    int64_t left = p->tolerance - (from - now);
    int64_t remaining = left < 0 ? 0 : left / p->interval;
    call->limit = p->quota;
    call->remaining = remaining;
    call->reset_us = from > now ? up(from - asked, d) : 0;
    call->retry_after_us = wait;
    call->next_us = from > now ? up((remaining + 1) * p->interval - left + (now - asked), d) : 0;
    return cost <= p->quota ? ANSWERED : NEVER;
}

/* ---- looking ------------------------------------------------------------------------------------------------------- */

/* A multiply-shift of three mixes of the fingerprint; candidates that fall together move on to the next bucket. */
static void candidates(const struct table *t, uint64_t fingerprint, struct slot *bucket[CANDIDATES]) {
    uint64_t at[CANDIDATES], mix = fingerprint;
    for (int i = 0; i < CANDIDATES; i++) {
        at[i] = (mix >> 32) * t->buckets >> 32;
        for (int j = 0; j < i; j++)
            if (at[j] == at[i]) {
                at[i] = at[i] + 1 == t->buckets ? 0 : at[i] + 1;
                j = -1;                    /* at most CANDIDATES - 1 moves, since a table has that many buckets */
            }
        bucket[i] = t->slots + at[i] * BUCKET;
        mix = (mix ^ mix >> 32) * UINT64_C(0x9e3779b97f4a7c15) + 1;
    }
}

struct found {
    struct slot *slot;                     /* NULL: the key has none */
    uint64_t state;
    int reserved;                          /* it is reserved; otherwise committed, live or expired */
    int several;                           /* reservations were more than one: not a finding to build on */
};

/* One scan of the candidates for the fingerprint, whole unless it meets a committed slot.  Of several reservations,
 * `clear` takes away all but the first in the order of the scan: so every worker keeps the same one. */
static struct found find(struct slot *const bucket[CANDIDATES], uint64_t fingerprint, int clear) {
    struct found f = {0};
    for (int b = 0; b < CANDIDATES; b++)
        for (int i = 0; i < BUCKET; i++) {
            struct slot *slot = bucket[b] + i;
            if (look(&slot->fingerprint) != fingerprint)
                continue;
            uint64_t state = look(&slot->state);
            if (state == 0)                /* emptied between the two looks */
                continue;
            if (!is_reserved(state))
                return (struct found){.slot = slot, .state = state};
            if (!f.slot) {
                f.slot = slot, f.state = state, f.reserved = 1;
            } else {
                f.several = 1;
                if (clear)
                    swap_pair(slot, fingerprint, state, 0, 0);
            }
        }
    return f;
}

struct room {
    struct slot *slot;                     /* NULL: every slot that was looked at is in use */
    uint64_t fingerprint, state;           /* what is in it */
    int64_t until_us;                      /* no room: the soonest that a slot may be free */
};

/* Where a new key goes: an empty slot of the emptiest bucket that has one, else the longest expired state (or a dead
 * reservation) of the emptiest bucket.  "Expired" is as of `now_us`; how old a reservation is, the table's own clock
 * says.  The look is no snapshot, and need not be: the swap that follows compares the pair. */
static struct room make_room(const struct table *t, struct slot *const bucket[CANDIDATES], int64_t now_us) {
    struct room best = {.until_us = INT64_MAX};
    int best_free = 0, best_empty = 0;
    int64_t clock_ms = -1;
    for (int b = 0; b < CANDIDATES; b++) {
        struct room here = {0};
        int free = 0, empty = 0;
        int64_t oldest = INT64_MAX;
        for (int i = 0; i < BUCKET; i++) {
            struct slot *slot = bucket[b] + i;
            uint64_t fingerprint = look(&slot->fingerprint), state = look(&slot->state);
            int64_t since;
            if (state == 0) {
                since = INT64_MIN;
                empty = 1;
            } else if (is_reserved(state)) {
                if (clock_ms < 0)
                    clock_ms = clock_us(t->header) / 1000;
                int64_t age_ms = clock_ms - reserved_ms(state);
                if (age_ms < RESERVED_MS && age_ms > -RESERVED_MS) {
                    int64_t until_us = now_us + (RESERVED_MS - age_ms) * 1000;
                    best.until_us = until_us < best.until_us ? until_us : best.until_us;
                    continue;
                }
                since = INT64_MIN + 1;     /* nothing is forgotten with it: the next best after an empty slot */
            } else {
                since = expiry_us(state);
                if (since > now_us) {
                    best.until_us = since < best.until_us ? since : best.until_us;
                    continue;
                }
            }
            free++;
            if (since < oldest) {
                oldest = since;
                here = (struct room){slot, fingerprint, state, 0};
            }
        }
        if (free && (empty > best_empty || (empty == best_empty && free > best_free))) {
            best_free = free, best_empty = empty;
            best.slot = here.slot, best.fingerprint = here.fingerprint, best.state = here.state;
        }
    }
    return best;
}

/* Reserves the slot for the fingerprint; gives the word of the reservation, or 0 when the swap was lost.
 * The word differs for every reservation, or a worker could take another's for the one it saw: milliseconds of the
 * table's clock, the lane, and 13 bits of the lane's counter (8,192 in one millisecond through one lane is more than
 * the two swaps and three scans of each leave time for). */
static uint64_t reserve(const struct table *t, const struct room *room, uint64_t fingerprint) {
    uint64_t n = __atomic_fetch_add(&t->lane->nonces, 1, __ATOMIC_RELAXED);
    uint64_t lane = (uint64_t)(t->lane - t->header->lanes);
    uint64_t ms = (uint64_t)(clock_us(t->header) / 1000) & ((UINT64_C(1) << 42) - 1);
    uint64_t word = ms << 19 | lane << 13 | (n & 8191);
    if (!swap_pair(room->slot, room->fingerprint, room->state, fingerprint, word))
        return 0;
    if (room->state && !is_reserved(room->state))
        add(&t->lane->reclaimed, 1);
    return word;
}

/* No room: denied until the first of the slots that were looked at may be free.  Cost 0 is always there to be had. */
static int no_room(struct call *call, int64_t until_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t wait_us = max64(until_us - asked_us, 1);
    call->allowed = cost == 0;
    call->limit = p->quota;
    call->remaining = 0;
    call->reset_us = call->next_us = wait_us;
    call->retry_after_us = cost == 0 ? 0 : wait_us;
    return cost <= p->quota ? ANSWERED : NEVER;
}

/* ---- taking -------------------------------------------------------------------------------------------------------- */

struct request {                           /* one call, with all that follows from its key */
    struct call *call;
    struct table *table;
    uint64_t fingerprint;
    struct slot *bucket[CANDIDATES];
    int64_t asked_us, cost;
    int charge;                            /* a take; otherwise a peek, which counts nothing */
    int writes;                            /* a take that may change a state */
};

static struct request request(struct call *call, const unsigned char *key, int length, int64_t cost, int charge) {
    const struct policy *p = call->policy;
    struct request r = {.call = call, .table = p->table, .cost = cost, .charge = charge};
    r.asked_us = call->now_us >= 0 ? call->now_us : clock_us(r.table->header);
    r.fingerprint = siphash(p->key, key, (size_t)length);
    r.fingerprint += r.fingerprint == 0;   /* 0 means empty */
    r.writes = charge && cost > 0 && cost <= p->quota;
    candidates(r.table, r.fingerprint, r.bucket);
    return r;
}

static inline void lost(const struct request *r) { add(&r->table->lane->contended, 1); }

static int counted(const struct request *r, int status) {
    if (r->charge && status >= 0)
        add(r->call->allowed ? &r->table->lane->allowed : &r->table->lane->denied, 1);
    return status;
}

static int full(const struct request *r, int64_t until_us) {
    if (r->writes)
        add(&r->table->lane->full, 1);
    return no_room(r->call, until_us, r->asked_us, r->cost);
}

static int is_unchanged(const struct request *r, const struct found *f) {
    return look(&f->slot->fingerprint) == r->fingerprint && look(&f->slot->state) == f->state;
}

/* Decides on a committed state.  AGAIN when the slot changed meanwhile: a charge is only given for a swap of the very
 * pair that was judged, and any other answer for a pair that a second look confirms. */
static int hit(const struct request *r, const struct found *f) {
    int64_t d = r->call->policy->denominator;
    if (!(f->state >> 63))                 /* no GCRA word under a GCRA fingerprint */
        return is_unchanged(r, f) ? CORRUPT : AGAIN;
    int64_t tat = gcra_tat(f->state, d);
    int status = gcra(r->call, &tat, r->asked_us, r->asked_us, r->cost);
    if (!r->writes || !r->call->allowed)
        return is_unchanged(r, f) ? status : AGAIN;
    if (swap_pair(f->slot, r->fingerprint, f->state, r->fingerprint, gcra_word(tat, d)))
        return status;
    lost(r);
    return AGAIN;
}

/* Decides on a fresh state, as of no earlier time than anything that was forgotten: perhaps this very key was.  The
 * watermark is read after the scan that did not find the key, and whoever forgot it had published before that. */
static int fresh(const struct request *r, uint64_t *state) {
    uint64_t watermark = look(&r->table->header->watermark_us);
    int64_t d = r->call->policy->denominator, as_of_us = r->asked_us;
    if (watermark > (uint64_t)as_of_us)
        as_of_us = watermark < (uint64_t)NOW_MAX_US ? (int64_t)watermark : NOW_MAX_US;
    int64_t tat = as_of_us * d;
    int status = gcra(r->call, &tat, as_of_us, r->asked_us, r->cost);
    *state = gcra_word(tat, d);
    return status;
}

/* No room was found.  Another worker may have given the last free slot to this very key since the scan: then AGAIN. */
static int full_unless_found(const struct request *r, const struct room *room) {
    return find(r->bucket, r->fingerprint, 0).slot ? AGAIN : full(r, room->until_us);
}

/* The answer of a peek, or of a take that can change nothing, for a key that has no state. */
static int report(const struct request *r, const struct found *f) {
    uint64_t unused;
    if (!f->slot) {
        struct room room = make_room(r->table, r->bucket, r->asked_us);
        if (!room.slot)
            return full_unless_found(r, &room);
    }
    return counted(r, fresh(r, &unused));
}

/* The whole protocol; tests/models/claim.pml is its model. */
static int decide(const struct request *r) {
    struct found seen = {0};               /* the reservation of this key that I saw, or made, before the last scan */
    struct found made = {0};
    uint64_t state;
    for (int i = 0; i < TRIES; i++) {
        struct found f = find(r->bucket, r->fingerprint, r->writes);
        if (f.slot && !f.reserved) {
            int status = hit(r, &f);
            if (status == AGAIN)
                continue;
            if (made.slot && made.slot != f.slot) /* mine wasn't the one that was kept */
                swap_pair(made.slot, r->fingerprint, made.state, 0, 0);
            return counted(r, status);
        }
        if (!r->writes) {
            int status = report(r, &f);
            if (status == AGAIN)
                continue;
            return status;
        }
        if (f.several)
            continue;
        if (f.slot) {
            if (seen.slot == f.slot && seen.state == f.state) {
                /* A whole scan since I first saw exactly this reservation found it alone: commit. */
                int status = fresh(r, &state);
                if (swap_pair(f.slot, r->fingerprint, f.state, r->fingerprint, state))
                    return counted(r, status);
                lost(r);
                f.slot = NULL;
            }
            seen = f;
            continue;
        }
        struct room room = make_room(r->table, r->bucket, r->asked_us);
        if (!room.slot) {
            int status = full_unless_found(r, &room);
            if (status == AGAIN)
                continue;
            return status;
        }
        if (room.state && !is_reserved(room.state) &&
            !raise_word(&r->table->header->watermark_us, (uint64_t)expiry_us(room.state)))
            return CONTENDED;              /* unpublished, so nothing may be forgotten */
        made.state = reserve(r->table, &room, r->fingerprint);
        made.slot = made.state ? room.slot : NULL;
        if (!made.slot)
            lost(r);
        seen = made;
    }
    return CONTENDED;
}

EXPORT int shmlimit_take(struct call *call, const unsigned char *key, int length, int cost) {
    struct request r = request(call, key, length, cost, 1);
    return decide(&r);
}

EXPORT int shmlimit_peek(struct call *call, const unsigned char *key, int length, int cost) {
    struct request r = request(call, key, length, cost, 0);
    return decide(&r);
}

/* Forgets a live state on request: 1 when there was one.  No watermark: a reset is meant to grant the quota anew. */
EXPORT int shmlimit_reset(struct call *call, const unsigned char *key, int length) {
    struct request r = request(call, key, length, 0, 0);
    for (int i = 0; i < TRIES; i++) {
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
        offsetof(struct header, slots), offsetof(struct header, group_slots), offsetof(struct header, secret),
        offsetof(struct header, clock_offset_us), offsetof(struct header, watermark_us),
        offsetof(struct header, shared_until_us), offsetof(struct header, lanes),
    };
    memcpy(out, layout, sizeof layout);
    return (int)(sizeof layout / sizeof *layout);
}
