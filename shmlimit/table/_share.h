/* What a key does that finds no room: it takes one of the spare slots, a second region that is small.  When there is room
 * again it moves back: its new slot begins with the state of the spare one.  tests/models/share.pml is the model of it.
 *
 * One state for each key, not one for a group of keys.  A group is as safe, but its keys begin with what others took, live
 * longer for it, and keep the table full: at 70 % load, after a crowd, 78 % of them went on getting less than their limit.
 * Included by _table.c alone. */
#include "_claim.h"

static int counted(const struct request *r, int status) {
    struct lane *lane = r->table->lane;
    const struct call *call = r->call;
    if (status < 0)
        return status;
    if (r->counts) {
        add(call->allowed ? &lane->allowed : call->full && !(status & NEVER) ? &lane->full : &lane->denied, 1);
        if (call->shared)
            add(&lane->shared, 1);
    }
    return status | (call->shared || call->full ? CROWDED : 0);
}

/* No room, not even a spare slot: denied until the first of the slots that were looked at may be free.  Cost 0 is always
 * there to be had. */
static int full(const struct request *r, int64_t until_us) {
    struct call *call = r->call;
    int64_t wait_us = max64(until_us - r->asked_us, 1);
    call->allowed = r->cost == 0;
    call->shared = 0;
    call->full = 1;
    call->limit = call->policy->quota;
    call->remaining = 0;
    call->reset_us = call->next_us = wait_us;
    call->retry_after_us = r->cost == 0 ? 0 : wait_us;
    return r->cost <= call->policy->quota ? ANSWERED : NEVER;
}

/* Takes the call's charge off again: 1 when that was done.  What can't be given back stays charged. */
static int undo(const struct request *r) {
    struct call *call = r->call;
    while (call->charged && may_try(r)) {
        struct found f = find(r->bucket, r->fingerprint, 0);
        if (!f.slot || f.reserved)
            return 0;                      /* reset, or forgotten: nothing is left of it */
        if (kind_of(f.state) != call->policy->kind)
            continue;                      /* between two keys */
        uint64_t to = give_back(call, f.state, r->cost);
        if (to == f.state)
            return 0;
        if (swap_pair(f.slot, r->fingerprint, f.state, r->fingerprint, to))
            return 1;
        lost(r);
    }
    return call->charged ? CONTENDED : 0;
}

/* Whether the key, charged in a spare slot as of `stamp_us`, has no other in which the same could be taken again.
 *
 * A claimer reads the spare slot after it has reserved.  Either that was after my charge, then the claimer counts it; or it
 * reserved before my charge, then I find the reservation now and clear it, or what it has become: then its hits and mine
 * must come together.  An expired slot is no less found, since it begins anew without a look at the spare one.  And it may
 * have been forgotten meanwhile: then the watermark has passed my stamp, or what it held had run out by then.
 *
 * One pass is enough, since whoever reserves behind it counts my charge: so two can't undo each other's work for ever. */
static int stands_alone(const struct request *r, int64_t stamp_us) {
    for (int i = 0; i < CANDIDATES * BUCKET; i++) {
        struct slot *slot = r->bucket[i / BUCKET] + i % BUCKET;
        uint64_t state;
        while (look(&slot->fingerprint) == r->fingerprint && (state = look(&slot->state)) != 0) {
            if (!is_reserved(state) || !may_try(r))
                return 0;
            if (swap_pair(slot, r->fingerprint, state, 0, 0))
                break;
        }
    }
    return raised_us(r) <= stamp_us;
}

/* Decides for a key that found no room. */
static int share(const struct request *r, const struct room *room) {
    struct request spare = spare_of(r, raised_us(r));
    struct room unused;
    int status = claim(&spare, &unused);
    if (status == NO_ROOM)
        status = full(r, room->until_us);
    else
        r->call->shared = 1;
    if (status < 0)
        return status;
    if (!r->call->charged)                 /* another worker may have found room for this very key since */
        return is_there(r->bucket, r->fingerprint) ? AGAIN : status;
    if (stands_alone(r, spare.as_of_us)) {
        r->call->in_spare = 1;
        return status;
    }
    undo(&spare);
    r->call->charged = 0;
    return AGAIN;
}

static int decide(const struct request *r) {
    struct room room;
    int status;
    do {
        status = claim(r, &room);
        if (status == NO_ROOM)
            status = share(r, &room);
    } while (status == AGAIN);
    return counted(r, status);
}
