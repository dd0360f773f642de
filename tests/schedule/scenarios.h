/* What is tried: who does what, on which table.  Data only; driver.c says how it is searched.
 *
 * Times are whole seconds, and the clock shows CLOCK at the start.  The table has MAIN slots in three buckets, and a
 * second region of as many spare ones.  Those named in `free`, and those of `before`, are in play; all others hold live
 * states of keys that nobody here asks for. */
#include <stdint.h>

enum { TAKERS = 3, OPS = 3, KEYS = 4, PAST = 5, MAIN = 24, PLACES = 2 * MAIN, CLOCK = 100, ALL = 1000 };

enum what { NOTHING, TAKES, PEEKS, CHARGES, GIVES_BACK, RESETS, TICK };

struct op {
    enum what what;
    int key, at, cost;                     /* at 0: as of the clock; of a TICK: what it shows from then on */
};

struct past {                              /* what had been kept of a key before, or (cost 0) a reservation of it */
    int place, key, at, cost;
};

struct limit {                             /* GCRA: `quota` is the burst, `period` the emission interval in seconds */
    int kind, quota, period;
};

struct scenario {
    const char *name;
    int preemptions, deaths, shares;       /* shares: keys without room are meant to find a spare slot */
    struct limit limit[KEYS];              /* {0}: as for key 0 */
    uint64_t free;
    struct past before[PAST];
    struct op ops[TAKERS][OPS];
};

#define SLOT(n) (UINT64_C(1) << (n))       /* buckets begin at 0, 8 and 16 */
#define SPARE(n) SLOT(MAIN + (n))
#define ONE {GCRA, 1, 10}                     /* GCRA, burst 1, one in 10 seconds */
#define TWO {GCRA, 2, 10}
#define THREE {GCRA, 3, 10}
#define FIXED_2 {FIXED, 2, 10}                 /* fixed window of 10 s, 2 requests */
#define SLIDING_2 {SLIDING, 2, 10}

/* Key 0 is spent and has expired at 100; a key that comes then takes its slot.  One that comes earlier takes slot 8. */
#define EXPIRING(at, cost) {0, 0, at, cost}, {1, 2, at, cost}, {8, 2, 50, 0}

static const struct scenario SCENARIOS[] = {
    {"two takers meet a new key", ALL, .limit = {ONE}, .free = SLOT(0) | SLOT(8),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}}},
    {"three takers meet a new key", 3, .limit = {ONE}, .free = SLOT(0) | SLOT(8),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}}},
    {"three takers meet a new key of burst two, in one bucket", 3, .limit = {TWO}, .free = SLOT(0) | SLOT(1),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 99, 2}}, {{TAKES, 0, 101, 1}}}},
    {"two takers of a new key choose different slots", ALL, .limit = {ONE}, .before = {{0, 2, 90, 1}, {1, 1, 85, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}}},
    {"three takers of a new key choose different slots", 4, .limit = {THREE}, .before = {{0, 2, 90, 1}, {1, 1, 85, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}}},
    {"a new key in a table with three free slots", ALL, .limit = {TWO}, .free = SLOT(0) | SLOT(8) | SLOT(16),
     .ops = {{{TAKES, 0, 100, 1}, {TAKES, 0, 101, 1}}, {{TAKES, 0, 99, 1}, {PEEKS, 0, 100, 1}}}},
    {"another key competes for the last slot", ALL, .limit = {ONE}, .free = SLOT(3),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}}},
    {"another key competes for two slots", 3, .limit = {ONE}, .free = SLOT(0) | SLOT(8),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}}},
    {"the key itself gets the last slot meanwhile", ALL, .limit = {TWO}, .free = SLOT(3),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}, {PEEKS, 0, 100, 1}}}},
    {"a peek meets a new key", ALL, .limit = {ONE}, .free = SLOT(3),
     .ops = {{{PEEKS, 0, 100, 1}}, {{TAKES, 0, 100, 1}, {TAKES, 0, 104, 1}}}},

    {"a key is forgotten and comes back with an old clock", ALL, .limit = {ONE}, .before = {EXPIRING(90, 1)},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 1, 100, 1}, {TAKES, 0, 100, 1}}}},
    {"a key is forgotten, and two come back", 4, .limit = {TWO}, .before = {EXPIRING(90, 1)},
     .ops = {{{TAKES, 0, 99, 2}}, {{TAKES, 1, 100, 1}}, {{TAKES, 0, 98, 1}}}},
    {"a key is forgotten that was taken after a worker read the clock", ALL, .limit = {ONE},
     .before = {EXPIRING(90, 1)},
     .ops = {{{TAKES, 0, 0, 1}}, {{TAKES, 0, 0, 1}, {TICK, 0, 120, 0}, {TAKES, 1, 0, 1}}}},
    {"a fixed window is forgotten and comes back", ALL, .limit = {FIXED_2}, .before = {EXPIRING(98, 2)},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 1, 100, 1}, {TAKES, 0, 100, 2}}}},
    {"a sliding window is forgotten and comes back", ALL, .limit = {SLIDING_2}, .before = {EXPIRING(82, 2)},
     .ops = {{{TAKES, 0, 99, 2}}, {{TAKES, 1, 100, 1}, {TAKES, 0, 101, 2}}}},

    {"two hits on one slot", ALL, .limit = {ONE}, .free = SLOT(8), .before = {{0, 0, 80, 1}},
     .ops = {{{TAKES, 0, 100, 1}, {TAKES, 0, 105, 1}}, {{TAKES, 0, 101, 1}, {TAKES, 0, 110, 1}}}},
    {"three hits on one slot", ALL, .limit = {THREE}, .before = {{0, 0, 80, 1}},
     .ops = {{{TAKES, 0, 100, 2}, {PEEKS, 0, 100, 2}}, {{TAKES, 0, 101, 2}}, {{TAKES, 0, 99, 1}}}},
    {"three hits on a fixed window", ALL, .limit = {FIXED_2}, .before = {{0, 0, 88, 1}},
     .ops = {{{TAKES, 0, 98, 1}}, {{TAKES, 0, 99, 2}, {TAKES, 0, 101, 1}}, {{TAKES, 0, 100, 1}}}},
    {"three hits on a sliding window", ALL, .limit = {SLIDING_2}, .before = {{0, 0, 88, 1}},
     .ops = {{{TAKES, 0, 92, 1}}, {{TAKES, 0, 96, 1}, {TAKES, 0, 104, 1}}, {{TAKES, 0, 95, 1}}}},
    {"a slot passes to another key under the hands", ALL, .limit = {ONE}, .before = {{0, 0, 80, 1}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}}},
    {"a slot passes to a key of another kind", ALL, .limit = {ONE, FIXED_2}, .before = {{0, 0, 80, 1}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}}},
    {"a slot passes to another key and back", ALL, .limit = {TWO}, .before = {{0, 0, 80, 1}},
     .ops = {{{TAKES, 0, 90, 1}}, {{TAKES, 1, 95, 1}}, {{TAKES, 0, 105, 1}}}},

    {"a dead taker left a reservation of the key", ALL, .limit = {ONE}, .free = SLOT(8), .before = {{0, 0, 100, 0}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}}},
    {"a dead taker left a reservation long ago", 4, .limit = {ONE}, .free = SLOT(8), .before = {{0, 2, 90, 0}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}, {{TAKES, 2, 100, 1}}}},
    {"a dead taker left a fresh reservation and there is no other slot", ALL, .limit = {ONE}, .before = {{0, 2, 100, 0}},
     .ops = {{{TAKES, 0, 0, 1}, {TAKES, 0, 0, 1}}, {{TICK, 0, 101, 0}, {TAKES, 0, 0, 1}}}},
    {"a taker sleeps on its reservation", ALL, .limit = {ONE}, .free = SLOT(0),
     .ops = {{{TAKES, 0, 0, 1}}, {{TICK, 0, 101, 0}}, {{TAKES, 1, 0, 1}}}},
    {"two takers of a new key, one is killed", ALL, 1, .limit = {ONE}, .free = SLOT(0) | SLOT(8),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}, {TAKES, 0, 110, 1}}}},
    {"three takers of two keys, two are killed", ALL, 2, .limit = {ONE}, .before = {{0, 0, 90, 1}, {8, 2, 90, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 1, 100, 1}}, {{TAKES, 0, 101, 1}}}},
    {"a killed one leaves the last slot reserved", 3, 1, .limit = {ONE}, .free = SLOT(0),
     .ops = {{{TAKES, 0, 0, 1}}, {{TAKES, 1, 0, 1}, {TICK, 0, 101, 0}, {TAKES, 1, 0, 1}}, {{TAKES, 0, 0, 1}}}},

    {"a reset races two takers", ALL, .limit = {TWO}, .free = SLOT(8), .before = {{0, 0, 100, 1}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 101, 1}}, {{RESETS, 0, 100, 0}}}},
    {"a reset races takers of a new key", ALL, .limit = {ONE}, .free = SLOT(0) | SLOT(8),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}, {{RESETS, 0, 100, 0}}}},
    {"a reset races a slot that passes to another key", ALL, .limit = {ONE}, .before = {{0, 0, 90, 1}},
     .ops = {{{RESETS, 0, 99, 0}, {TAKES, 0, 99, 1}}, {{TAKES, 1, 100, 1}}}},

    {"two charge and give back", ALL, .limit = {TWO}, .before = {{0, 0, 80, 1}},
     .ops = {{{CHARGES, 0, 100, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 100, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 104, 1}, {TAKES, 0, 104, 1}, {TAKES, 0, 111, 1}}}},
    {"three charge and two give back", ALL, .limit = {THREE}, .before = {{0, 0, 95, 1}},
     .ops = {{{CHARGES, 0, 100, 2}, {GIVES_BACK, 0, 0, 2}}, {{CHARGES, 0, 105, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 100, 1}, {TAKES, 0, 107, 2}}}},
    {"a fixed window is charged and given back", ALL, .limit = {FIXED_2}, .before = {{0, 0, 98, 1}},
     .ops = {{{CHARGES, 0, 101, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 99, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 99, 1}, {TAKES, 0, 102, 1}}}},
    {"a sliding window is charged and given back", ALL, .limit = {SLIDING_2}, .before = {{0, 0, 98, 1}},
     .ops = {{{CHARGES, 0, 101, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 112, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 99, 1}, {TAKES, 0, 106, 1}}}},
    {"a spent window is left, and it is given back", ALL, .limit = {FIXED_2}, .before = {{0, 0, 98, 2}},
     .ops = {{{CHARGES, 0, 101, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 102, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 99, 1}, {TAKES, 0, 103, 1}}}},
    {"a spent sliding window is left, and it is given back", ALL, .limit = {SLIDING_2}, .before = {{0, 0, 98, 2}},
     .ops = {{{CHARGES, 0, 121, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 122, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 99, 1}, {TAKES, 0, 123, 1}}}},
    {"a new window is charged and given back", ALL, .limit = {FIXED_2}, .free = SLOT(0) | SLOT(8),
     .ops = {{{CHARGES, 0, 101, 1}, {GIVES_BACK, 0, 0, 1}, {TAKES, 0, 103, 1}}, {{TAKES, 0, 101, 1}, {TAKES, 0, 102, 1}}}},
    {"a charge is given back to a key that is forgotten meanwhile", ALL, .limit = {TWO}, .before = {{0, 0, 80, 1}},
     .ops = {{{CHARGES, 0, 90, 1}, {GIVES_BACK, 0, 0, 1}}, {{TAKES, 1, 100, 1}}, {{TAKES, 0, 110, 2}}}},
    {"a charge is given back to a slot that passes to another kind", ALL, .limit = {ONE, FIXED_2},
     .before = {{0, 0, 80, 1}},
     .ops = {{{CHARGES, 0, 90, 1}, {GIVES_BACK, 0, 0, 1}}, {{TAKES, 1, 100, 1}}, {{TAKES, 0, 110, 1}}}},

    {"two share without room", ALL, .shares = 1, .limit = {TWO}, .free = SPARE(0) | SPARE(8),
     .ops = {{{TAKES, 0, 100, 1}, {TAKES, 0, 101, 1}}, {{TAKES, 0, 100, 1}}}},
    {"three share without room", 3, .shares = 1, .limit = {TWO}, .free = SPARE(0) | SPARE(1),
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 1, 100, 1}}, {{TAKES, 0, 101, 1}}}},
    {"a slot gets free while its key shares", ALL, .shares = 1, .limit = {ONE}, .free = SPARE(0),
     .before = {{0, 2, 90, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}}},
    {"two slots get free while a key shares", ALL, .shares = 1, .limit = {TWO}, .free = SPARE(0),
     .before = {{0, 2, 90, 1}, {8, 2, 90, 0}},
     .ops = {{{TAKES, 0, 99, 2}}, {{TAKES, 0, 100, 1}, {TAKES, 0, 101, 1}}}},
    {"a slot gets free while two take spare slots", 2, .shares = 1, .limit = {TWO}, .free = SPARE(0),
     .before = {{0, 2, 90, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 1, 99, 1}, {TAKES, 0, 100, 1}}}},
    {"a slot gets free while a fixed window is shared", 7, .shares = 1, .limit = {FIXED_2}, .free = SPARE(0),
     .before = {{0, 2, 99, 1}},
     .ops = {{{TAKES, 0, 99, 2}, {TAKES, 0, 101, 1}}, {{TAKES, 0, 100, 2}}}},
    {"a slot gets free while a sliding window is shared", 6, .shares = 1, .limit = {SLIDING_2}, .free = SPARE(0),
     .before = {{0, 2, 88, 1}},
     .ops = {{{TAKES, 0, 99, 2}}, {{TAKES, 0, 100, 2}, {TAKES, 0, 108, 1}}}},
    {"a key that shares is claimed and forgotten meanwhile", 3, .shares = 1, .limit = {ONE},
     .before = {{0, 2, 90, 1}, {MAIN, 0, 80, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 1, 111, 1}}}},
    {"a spare slot is in use when its key is claimed", ALL, .shares = 1, .limit = {TWO}, .free = SLOT(0),
     .before = {{MAIN, 0, 95, 1}},
     .ops = {{{TAKES, 0, 100, 1}, {TAKES, 0, 100, 1}}, {{TAKES, 0, 101, 1}, {PEEKS, 0, 101, 1}}}},
    {"a spare slot is forgotten while its key is claimed", ALL, .shares = 1, .limit = {TWO, {0}, FIXED_2}, .free = SLOT(0),
     .before = {{MAIN, 0, 100, 1}},
     .ops = {{{TAKES, 0, 105, 1}, {TAKES, 0, 105, 1}}, {{TAKES, 2, 111, 1}}}},
    {"a spare slot is spent while its key is claimed", 3, .shares = 1, .limit = {TWO}, .free = SPARE(0),
     .before = {{0, 2, 90, 1}, {8, 3, 90, 1}},
     .ops = {{{TAKES, 0, 100, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 0, 99, 2}}}},
    {"a key shares while its slot expires", ALL, .shares = 1, .limit = {ONE}, .free = SLOT(0) | SPARE(0),
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 80, 1}, {TAKES, 0, 100, 1}}}},
    {"two keys compete for the last spare slot", ALL, .shares = 1, .limit = {ONE, {0}, FIXED_2}, .before = {{MAIN, 2, 80, 1}},
     .ops = {{{TAKES, 0, 100, 1}, {PEEKS, 0, 100, 1}}, {{TAKES, 2, 100, 1}}}},
    {"a spare slot is forgotten and comes back", ALL, .shares = 1, .limit = {ONE, FIXED_2, TWO},
     .before = {{MAIN, 0, 90, 1}, {MAIN + 1, 2, 90, 1}, {MAIN + 8, 2, 50, 0}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 1, 100, 1}, {TAKES, 0, 100, 1}}}},
    {"charges of a spare slot are given back", 3, .shares = 1, .limit = {TWO}, .free = SPARE(0),
     .ops = {{{CHARGES, 0, 100, 1}, {GIVES_BACK, 0, 0, 1}}, {{CHARGES, 0, 101, 1}, {GIVES_BACK, 0, 0, 1}},
             {{TAKES, 0, 102, 1}}}},
    {"charges are given back while a slot gets free", 6, .shares = 1, .limit = {TWO}, .free = SPARE(0),
     .before = {{0, 2, 90, 1}},
     .ops = {{{CHARGES, 0, 99, 1}, {GIVES_BACK, 0, 0, 1}}, {{TAKES, 0, 100, 1}, {TAKES, 0, 101, 1}}}},
    {"a key is reset while it takes a spare slot", 5, .shares = 1, .limit = {ONE}, .free = SPARE(0), .before = {{0, 2, 90, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}, {RESETS, 0, 100, 0}, {TAKES, 0, 100, 1}}}},
    {"one that takes a spare slot is killed", 2, 1, .shares = 1, .limit = {ONE}, .free = SPARE(0), .before = {{0, 2, 90, 1}},
     .ops = {{{TAKES, 0, 99, 1}}, {{TAKES, 0, 100, 1}}, {{TAKES, 0, 99, 1}}}},
};
