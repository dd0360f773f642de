/* State words, and what a policy makes of one: the arithmetic of policies/, once more, in integers of 64 bits.  Pure.
 * Included by _table.c alone.  The differential test drives both with the same histories. */
#include "_call.h"

/* ---- state words ------------------------------------------------------------------------------------------------- */

enum kind { GCRA, FIXED, FIXED_LONG, SLIDING, SLIDING_LONG, RESERVED };

/* The prefix code (layout.py tells it).  `rest` is what stands below the time: fraction or counts. */
static const struct format {
    int prefix_bits, rest_bits, count_bits;
    uint64_t prefix;
    int64_t unit_us;
} FORMATS[] = {
    [GCRA] = {1, 11, 0, 1, 1},
    [FIXED] = {3, 19, 19, 2, 1000},
    [FIXED_LONG] = {3, 31, 31, 3, 4000000},
    [SLIDING] = {4, 18, 9, 2, 1000},
    [SLIDING_LONG] = {4, 28, 14, 3, 1000000},
};

static inline int kind_of(uint64_t state) {
    static const uint8_t kinds[16] = {RESERVED, RESERVED, SLIDING, SLIDING_LONG, FIXED, FIXED, FIXED_LONG, FIXED_LONG,
                                      GCRA,     GCRA,     GCRA,    GCRA,         GCRA,  GCRA,  GCRA,       GCRA};
    return kinds[state >> 60];
}

static inline int is_reserved(uint64_t state) { return kind_of(state) == RESERVED; } /* and not 0, which is empty */

static inline int64_t reserved_ms(uint64_t state) { return (int64_t)(state >> 19); }

static inline uint64_t low(uint64_t word, int bits) { return word & ((UINT64_C(1) << bits) - 1); }

static inline uint64_t word(int kind, uint64_t time, uint64_t rest) {
    const struct format *f = &FORMATS[kind];
    return f->prefix << (64 - f->prefix_bits) | time << f->rest_bits | rest;
}

static inline int64_t word_time(uint64_t state) {
    const struct format *f = &FORMATS[kind_of(state)];
    return (int64_t)(low(state, 64 - f->prefix_bits) >> f->rest_bits);
}

/* word_time of GCRA, the usual one, without the table. */
static inline int64_t gcra_time_us(uint64_t state) { return (int64_t)(low(state, 63) >> 11); }

/* From when on a committed state equals a fresh one, by the word alone: rounded up where only its owner knows more. */
static int64_t expiry_us(uint64_t state) {
    if (state >> 63)
        return gcra_time_us(state) + (low(state, 11) != 0);
    return word_time(state) * FORMATS[kind_of(state)].unit_us;
}

/* PERF: where the interval is whole, d is 1, and no division is made: 3 to 5 of them in a decision, 15 ns of 80. */
static inline uint64_t gcra_word(int64_t tat, int64_t d) {
    return d == 1 ? word(GCRA, (uint64_t)tat, 0) : word(GCRA, (uint64_t)(tat / d), (uint64_t)(tat % d));
}

static inline int64_t gcra_tat(uint64_t state, int64_t d) {
    int64_t fraction = (int64_t)low(state, 11);
    return gcra_time_us(state) * d + (fraction < d ? fraction : d - 1);
}

/* ---- deciding ----------------------------------------------------------------------------------------------------- */

static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rounded up, for n >= 0, also the largest there is.  PERF: see gcra_word. */
static inline int64_t up(int64_t n, int64_t d) {
    if (d == 1)
        return n;
    return n / d + (n % d != 0);
}

/* The generic cell rate algorithm, as in policies/gcra.py, in 1/d us.  64 bits are enough: a cost above the quota is
 * decided before it is multiplied, and nothing is added to the arrival time before the request is known to fit. */
static uint64_t gcra(struct call *call, uint64_t state, int64_t as_of_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t d = p->denominator, now = as_of_us * d, late = (as_of_us - asked_us) * d;
    int64_t from = state ? max64(gcra_tat(state, d), now) : now;
    if (cost <= p->quota) {
        int64_t early = from - now - (p->tolerance - cost * p->interval);
        call->allowed = early <= 0;
        call->retry_after_us = early <= 0 ? 0 : up(early + late, d);
        from += early <= 0 ? cost * p->interval : 0;
    }
    int64_t left = p->tolerance - (from - now);
    call->remaining = left < 0 ? 0 : left / p->interval;
    if (from > now) {
        call->reset_us = up(from - now + late, d);
        call->next_us = up((call->remaining + 1) * p->interval - left + late, d);
    }
    return gcra_word(from, d);
}

/* The end that a window's word stands for.  It is a multiple of the period, and was rounded up to a unit, which is no
 * longer than the period: the last multiple before is the one. */
static int64_t window_end(const struct policy *p, uint64_t state) {
    return expiry_us(state) / p->period_us * p->period_us;
}

static uint64_t window_word(const struct policy *p, int64_t end_us, uint64_t counts) {
    return word((int)p->kind, (uint64_t)up(end_us, FORMATS[p->kind].unit_us), counts);
}

/* The fixed window, as in policies/fixed_window.py. */
static uint64_t fixed_window(struct call *call, uint64_t state, int64_t as_of_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t end_us = (as_of_us / p->period_us + 1) * p->period_us, count = 0;
    if (state && window_end(p, state) >= end_us) {
        count = (int64_t)low(state, FORMATS[p->kind].count_bits); /* 0 after giving back: the line stays all the same */
        end_us = window_end(p, state);
    }
    call->allowed = count + cost <= p->quota;
    count += call->allowed ? cost : 0;
    call->remaining = max64(p->quota - count, 0);
    call->retry_after_us = call->allowed ? 0 : end_us - asked_us;
    call->reset_us = call->next_us = count ? end_us - asked_us : 0;
    return window_word(p, end_us, (uint64_t)count);
}

/* When a cost fits, by SlidingCounter._wait_us: `end_us` ends the window whose own count is `current`. */
static int64_t fits_at(const struct policy *p, int64_t end_us, int64_t previous, int64_t current, int64_t cost) {
    int64_t room = p->quota - current - cost;
    if (room < 0)
        end_us += p->period_us, previous = current, room = p->quota - cost;
    return end_us - room * p->period_us / previous;
}

/* The sliding-window counter, as in policies/sliding_counter.py. */
static uint64_t sliding_counter(struct call *call, uint64_t state, int64_t as_of_us, int64_t asked_us, int64_t cost) {
    const struct policy *p = call->policy;
    int64_t period = p->period_us, end_us = (as_of_us / period + 1) * period, previous = 0, current = 0;
    int bits = FORMATS[p->kind].count_bits;
    if (state) {
        int64_t own_end_us = window_end(p, state) - period; /* a word expires a period after its window's end */
        int64_t older = (int64_t)low(state >> bits, bits), newer = (int64_t)low(state, bits);
        if (own_end_us >= end_us)
            end_us = own_end_us, previous = older, current = newer;
        else if (own_end_us + period == end_us)
            previous = newer;
    }
    int64_t left_us = end_us - max64(end_us - period, as_of_us);
    int64_t weight = up(previous * left_us, period);
    call->allowed = weight + current + cost <= p->quota;
    if (!call->allowed && cost <= p->quota)
        call->retry_after_us = fits_at(p, end_us, previous, current, cost) - asked_us;
    current += call->allowed ? cost : 0;
    call->remaining = max64(p->quota - weight - current, 0);
    if (weight + current > 0) {
        call->reset_us = end_us + (current ? period : 0) - asked_us;
        call->next_us = fits_at(p, end_us, previous, current, call->remaining + 1) - asked_us;
    }
    return window_word(p, end_us + period, (uint64_t)previous << bits | (uint64_t)current);
}

/* Decides as of `as_of_us` on a state (0: a fresh one); waits are counted from `asked_us` (<= as_of_us).  Gives the word
 * after the request in *to, which means something only where the request is allowed. */
static int judge(struct call *call, uint64_t state, int64_t as_of_us, int64_t asked_us, int64_t cost, uint64_t *to) {
    const struct policy *p = call->policy;
    call->allowed = call->shared = call->full = 0;
    call->limit = p->quota;
    call->reset_us = call->retry_after_us = call->next_us = 0;
    if (p->kind == GCRA)
        *to = gcra(call, state, as_of_us, asked_us, cost);
    else if (p->kind <= FIXED_LONG)
        *to = fixed_window(call, state, as_of_us, asked_us, cost);
    else
        *to = sliding_counter(call, state, as_of_us, asked_us, cost);
    return cost <= p->quota ? ANSWERED : NEVER;
}

/* The word that is left when a charge of `cost` is given back to `state`; `state` itself where it can't be.
 *
 * To a bucket all of it, but only while the word is the one that the charge wrote.  Whatever is kept after it lifts the
 * word above that, and what others give back takes it no lower than what is kept: so while it is that word, nothing was
 * kept since, and it is as if the charge had not been.  (To give back by the clock what has not run out, also from
 * another word, is not safe: the word can come back to what it was between the look and the swap, with another request
 * kept meanwhile.  tests/models/giving_back.pml finds that.)
 *
 * To a window by its count, which has the charge in it, in the window that was charged or (sliding) the one after it.
 * The charge that opened a window replaced the one before, and gives that back whole, if nothing else is in its own: a
 * late worker must not find the older window empty.  For the same reason the last of several charges in a window that
 * another opened stays. */
static uint64_t give_back(const struct call *call, uint64_t state, int64_t cost) {
    const struct policy *p = call->policy;
    if (p->kind == GCRA) {
        int64_t d = p->denominator;
        return state == call->charged ? gcra_word(gcra_tat(state, d) - cost * p->interval, d) : state;
    }
    int bits = FORMATS[p->kind].count_bits;
    uint64_t units = (uint64_t)cost, newer = low(state, bits);
    int64_t charged_end = window_end(p, call->charged), end = window_end(p, state);
    if (state == call->charged && call->before)
        return call->before;
    if (end == charged_end && (newer > units || (newer == units && !call->before)))
        return state - units;
    if (p->kind >= SLIDING && end == charged_end + p->period_us && newer > 0 && low(state >> bits, bits) >= units)
        return state - (units << bits);
    return state;
}
