/* How a key is found in a region, takes a slot there, and is decided on: claim.pml in tests/models is the model of it.
 * Included by _table.c alone. */
#include "_memory.h"
#include "_policies.h"

enum { RESERVED_MS = 1000 };               /* so long others leave a reservation alone: its maker may have died */
#define NOW_MAX_US INT64_C(4133980800000000) /* 2101-01-01: with ten years on top it still fits 52 bits */

/* ---- looking ------------------------------------------------------------------------------------------------------- */

/* A multiply-shift of three mixes of the fingerprint; candidates that fall together move on to the next bucket. */
static void candidates(const struct region *region, uint64_t fingerprint, struct slot *bucket[CANDIDATES]) {
    uint64_t at[CANDIDATES], mix = fingerprint;
    for (int i = 0; i < CANDIDATES; i++) {
        at[i] = (mix >> 32) * region->buckets >> 32;
        for (int j = 0; j < i; j++)
            if (at[j] == at[i]) {
                at[i] = at[i] + 1 == region->buckets ? 0 : at[i] + 1;
                j = -1;                    /* at most CANDIDATES - 1 moves, since a table has that many buckets */
            }
        bucket[i] = region->slots + at[i] * BUCKET;
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

/* Whether the key has a slot, committed or reserved.  From the last to the first, since of several reservations the first
 * is kept: a key that moves meanwhile moves towards this look, and is not missed. */
static int is_there(struct slot *const bucket[CANDIDATES], uint64_t fingerprint) {
    for (int i = CANDIDATES * BUCKET; i-- > 0;) {
        const struct slot *slot = bucket[i / BUCKET] + i % BUCKET;
        if (look(&slot->fingerprint) == fingerprint && look(&slot->state) != 0)
            return 1;
    }
    return 0;
}

struct room {
    struct slot *slot;                     /* NULL: every slot that was looked at is in use */
    uint64_t fingerprint, state;           /* what is in it */
    int64_t until_us;                      /* no room: the soonest that a slot may be free */
};

/* Where a new key goes: an empty slot of the emptiest bucket that has one, else the longest expired state (or a dead
 * reservation) of the emptiest bucket.  "Expired" is as of `now_us`; how old a reservation is, the table's own clock
 * says.  The look is no snapshot, and need not be: the swap that follows compares the pair. */
static struct room make_room(const struct header *header, struct slot *const bucket[CANDIDATES], int64_t now_us) {
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
                    clock_ms = clock_us(header) / 1000;
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
    uint64_t n = add(&t->lane->nonces, 1);
    uint64_t lane = (uint64_t)(t->lane - t->header->lanes);
    uint64_t ms = (uint64_t)(clock_us(t->header) / 1000) & ((UINT64_C(1) << 42) - 1);
    uint64_t word = ms << 19 | lane << 13 | (n & 8191);
    if (!swap_pair(room->slot, room->fingerprint, room->state, fingerprint, word))
        return 0;
    if (room->state && !is_reserved(room->state))
        add(&t->lane->reclaimed, 1);
    return word;
}

/* ---- taking -------------------------------------------------------------------------------------------------------- */

struct request {                           /* one call, with all that follows from its key */
    struct call *call;
    const struct table *table;
    const struct region *region;           /* the table's slots, or its spare ones */
    uint64_t fingerprint;
    struct slot *bucket[CANDIDATES];
    int64_t asked_us;                      /* waits are counted from here */
    int64_t as_of_us;                      /* and states judged as of this: it may be later in a spare slot */
    int64_t cost;
    int counts;                            /* a take: it stands by itself, so it is counted at once */
    int writes;                            /* a take or a charge that may change a state */
};

enum mode { PEEK, CHARGE, TAKE };

static struct request request(struct call *call, const unsigned char *key, int length, int64_t cost, enum mode mode) {
    const struct policy *p = call->policy;
    struct request r = {.call = call, .table = p->table, .cost = cost, .counts = mode == TAKE};
    r.writes = mode != PEEK && cost > 0 && cost <= p->quota;
    call->tries = TRIES;
    call->charged = 0;
    call->in_spare = 0;
    r.fingerprint = siphash(p->key, key, (size_t)length);
    r.fingerprint += r.fingerprint == 0;   /* 0 means empty */
    r.region = &r.table->keys;
    candidates(r.region, r.fingerprint, r.bucket);
    /* PERF: the slots come into the cache while the clock is read: 30 ns of a decision with 10,000 keys in turn. */
    for (int i = 0; i < CANDIDATES; i++) {
        __builtin_prefetch(r.bucket[i]);
        __builtin_prefetch(r.bucket[i] + BUCKET / 2);
    }
    /* Within bounds, whatever the header says: the arithmetic of the policies is made for them. */
    int64_t asked_us = call->now_us >= 0 ? call->now_us : max64(clock_us(r.table->header), 0);
    r.as_of_us = r.asked_us = asked_us < NOW_MAX_US ? asked_us : NOW_MAX_US;
    return r;
}

static inline int is_spare(const struct request *r) { return r->region == &r->table->spare; }

/* The same request to the spare slots. */
static struct request spare_of(const struct request *r, int64_t as_of_us) {
    struct request spare = *r;
    spare.as_of_us = as_of_us;
    spare.region = &r->table->spare;
    candidates(spare.region, spare.fingerprint, spare.bucket);
    return spare;
}

/* Whether the call may look once more; all loops of a call draw on one bound. */
static inline int may_try(const struct request *r) { return r->call->tries-- > 0; }

static inline void lost(const struct request *r) { add(&r->table->lane->contended, 1); }

static int is_unchanged(const struct request *r, const struct found *f) {
    return look(&f->slot->fingerprint) == r->fingerprint && look(&f->slot->state) == f->state;
}

/* The time of a state that begins: no earlier than the expiry of anything that was forgotten. */
static int64_t raised_us(const struct request *r) {
    uint64_t watermark = look(&r->table->header->watermark_us);
    if (watermark <= (uint64_t)r->as_of_us)
        return r->as_of_us;
    return watermark < (uint64_t)NOW_MAX_US ? (int64_t)watermark : NOW_MAX_US;
}

/* Stores the state that was judged.  Before a spare slot has a charge, it is published until when spare slots are in use:
 * so a claimer that doesn't look there has its reservation in the table before the charge, and the charger finds it. */
static int store(const struct request *r, const struct found *f, uint64_t to) {
    if (is_spare(r) && !raise_word(&r->table->header->spare_until_us, (uint64_t)expiry_us(to)))
        return CONTENDED;
    if (!swap_pair(f->slot, r->fingerprint, f->state, r->fingerprint, to)) {
        lost(r);
        return AGAIN;
    }
    r->call->before = f->reserved ? 0 : f->state;
    r->call->charged = to;
    return ANSWERED;
}

/* Decides on a committed state.  AGAIN when the slot changed meanwhile: a charge is only given for a swap of the very
 * pair that was judged, and any other answer for a pair that a second look confirms. */
static int hit(const struct request *r, const struct found *f) {
    uint64_t to;
    if (kind_of(f->state) != r->call->policy->kind)
        return is_unchanged(r, f) ? CORRUPT : AGAIN;
    int status = judge(r->call, f->state, r->as_of_us, r->asked_us, r->cost, &to);
    if (!r->writes || !r->call->allowed)
        return is_unchanged(r, f) ? status : AGAIN;
    int stored = store(r, f, to);
    return stored == ANSWERED ? status : stored;
}

/* The state of the key's spare slot, 0 where it has none or none is in use. */
static int read_spare(const struct request *r, uint64_t *state) {
    *state = 0;
    if (is_spare(r) || look(&r->table->header->spare_until_us) <= (uint64_t)r->asked_us)
        return ANSWERED;
    struct request spare = spare_of(r, r->asked_us);
    while (may_try(r)) {
        struct found f = find(spare.bucket, spare.fingerprint, 0);
        if (!f.slot || f.reserved)
            return ANSWERED;
        if (!is_unchanged(&spare, &f))
            continue;
        if (kind_of(f.state) != r->call->policy->kind)
            return CORRUPT;
        *state = f.state;
        return ANSWERED;
    }
    return CONTENDED;
}

/* Decides on a state that begins: from a fresh one, or from that of the key's spare slot, which has hits of the key.  As
 * of no earlier time than anything that was forgotten: perhaps this very key was, in either.  The watermark is read
 * after the scans that did not find them, and whoever forgot them had published before that. */
static int fresh(const struct request *r, uint64_t *to) {
    uint64_t from;
    int status = read_spare(r, &from);
    if (status < 0)
        return status;
    int64_t as_of_us = raised_us(r);
    status = judge(r->call, from, as_of_us, r->asked_us, r->cost, to);
    r->call->shared = from && expiry_us(from) > as_of_us;
    return status;
}

/* Makes a reservation the key's state: a whole scan since I first saw exactly this one found it alone. */
static int commit(const struct request *r, const struct found *f) {
    uint64_t to;
    int status = fresh(r, &to);
    if (status < 0)
        return status;
    if (r->call->allowed) {
        int stored = store(r, f, to);
        return stored == ANSWERED ? status : stored;
    }
    if (swap_pair(f->slot, r->fingerprint, f->state, 0, 0))
        return status;                     /* it was spent in its spare slot */
    lost(r);
    return AGAIN;
}

/* The answer for a key without a slot, where nothing is to be written: a peek, or it was spent in its spare slot. */
static int report(const struct request *r) {
    uint64_t unused;
    return fresh(r, &unused);
}

/* Takes the room for the key: gives the reservation, no slot where the swap was lost. */
static int reserve_room(const struct request *r, const struct room *room, struct found *made) {
    *made = (struct found){0};
    /* Published before it is forgotten; what can't be published can't be forgotten. */
    if (room->state && !is_reserved(room->state) &&
        !raise_word(&r->table->header->watermark_us, (uint64_t)expiry_us(room->state)))
        return CONTENDED;
    uint64_t word = reserve(r->table, room, r->fingerprint);
    if (word)
        *made = (struct found){.slot = room->slot, .state = word, .reserved = 1};
    else
        lost(r);
    return ANSWERED;
}

/* The whole protocol in one region.  NO_ROOM: the key has no slot there and finds none, until `room` may be free. */
static int claim(const struct request *r, struct room *room) {
    struct found seen = {0};               /* the reservation of this key that I saw, or made, before the last scan */
    struct found made = {0};
    while (may_try(r)) {
        struct found f = find(r->bucket, r->fingerprint, r->writes);
        if (f.slot && !f.reserved) {
            int status = hit(r, &f);
            if (status == AGAIN)
                continue;
            if (made.slot && made.slot != f.slot) /* mine wasn't the one that was kept */
                swap_pair(made.slot, r->fingerprint, made.state, 0, 0);
            return status;
        }
        if (f.several && r->writes)
            continue;
        if (f.slot && r->writes) {
            if (seen.slot == f.slot && seen.state == f.state) {
                int status = commit(r, &f);
                if (status != AGAIN)
                    return status;
                f.slot = NULL;
            }
            seen = f;
            continue;
        }
        if (f.slot)
            return report(r);
        *room = make_room(r->table->header, r->bucket, r->as_of_us);
        if (!room->slot)
            return NO_ROOM;
        int status = report(r);
        if (status < 0 || !r->writes)
            return status;
        if (!r->call->allowed) {           /* spent in its spare slot, unless it has another by now */
            if (is_there(r->bucket, r->fingerprint))
                continue;
            return status;
        }
        status = reserve_room(r, room, &made);
        if (status < 0)
            return status;
        seen = made;
    }
    return CONTENDED;
}
