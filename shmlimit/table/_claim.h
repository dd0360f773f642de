/* The protocol: how a key is found, takes a slot, and is decided on.  tests/models/claim.pml is its model.
 * Included by _table.c alone. */
#include "_memory.h"
#include "_policies.h"

enum { RESERVED_MS = 1000 };               /* so long others leave a reservation alone: its maker may have died */
#define NOW_MAX_US INT64_C(4133980800000000) /* 2101-01-01: with ten years on top it still fits 52 bits */

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

/* No room: denied until the first of the slots that were looked at may be free.  Cost 0 is always there to be had. */
static int no_room(struct call *call, int64_t until_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t wait_us = max64(until_us - asked_us, 1);
    call->allowed = cost == 0;
    call->no_room = 1;
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
    int counts;                            /* a take: it stands by itself, so it is counted at once */
    int writes;                            /* a take or a charge that may change a state */
};

enum mode { PEEK, CHARGE, TAKE };

static struct request request(struct call *call, const unsigned char *key, int length, int64_t cost, enum mode mode) {
    const struct policy *p = call->policy;
    struct request r = {.call = call, .table = p->table, .cost = cost, .counts = mode == TAKE};
    r.asked_us = call->now_us >= 0 ? call->now_us : clock_us(r.table->header);
    r.fingerprint = siphash(p->key, key, (size_t)length);
    r.fingerprint += r.fingerprint == 0;   /* 0 means empty */
    r.writes = mode != PEEK && cost > 0 && cost <= p->quota;
    call->charged = 0;
    candidates(r.table, r.fingerprint, r.bucket);
    return r;
}

static inline void lost(const struct request *r) { add(&r->table->lane->contended, 1); }

static int counted(const struct request *r, int status) {
    if (r->counts && status >= 0)
        add(r->call->allowed ? &r->table->lane->allowed : &r->table->lane->denied, 1);
    return status;
}

static int full(const struct request *r, int64_t until_us) {
    int status = no_room(r->call, until_us, r->asked_us, r->cost);
    struct lane *lane = r->table->lane;
    if (r->counts)
        add(r->call->allowed ? &lane->allowed : status == NEVER ? &lane->denied : &lane->full, 1);
    return status;
}

static int is_unchanged(const struct request *r, const struct found *f) {
    return look(&f->slot->fingerprint) == r->fingerprint && look(&f->slot->state) == f->state;
}

/* Decides on a committed state.  AGAIN when the slot changed meanwhile: a charge is only given for a swap of the very
 * pair that was judged, and any other answer for a pair that a second look confirms. */
static int hit(const struct request *r, const struct found *f) {
    uint64_t to;
    if (kind_of(f->state) != r->call->policy->kind)
        return is_unchanged(r, f) ? CORRUPT : AGAIN;
    int status = judge(r->call, f->state, r->asked_us, r->asked_us, r->cost, &to);
    if (!r->writes || !r->call->allowed)
        return is_unchanged(r, f) ? status : AGAIN;
    if (swap_pair(f->slot, r->fingerprint, f->state, r->fingerprint, to)) {
        r->call->before = f->state, r->call->charged = to;
        return status;
    }
    lost(r);
    return AGAIN;
}

/* Decides on a fresh state, as of no earlier time than anything that was forgotten: perhaps this very key was.  The
 * watermark is read after the scan that did not find the key, and whoever forgot it had published before that. */
static int fresh(const struct request *r, uint64_t *to) {
    uint64_t watermark = look(&r->table->header->watermark_us);
    int64_t as_of_us = r->asked_us;
    if (watermark > (uint64_t)as_of_us)
        as_of_us = watermark < (uint64_t)NOW_MAX_US ? (int64_t)watermark : NOW_MAX_US;
    return judge(r->call, 0, as_of_us, r->asked_us, r->cost, to);
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
    uint64_t to;
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
                int status = fresh(r, &to);
                if (swap_pair(f.slot, r->fingerprint, f.state, r->fingerprint, to)) {
                    r->call->before = 0, r->call->charged = to;
                    return counted(r, status);
                }
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
