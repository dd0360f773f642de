/* A table in plain memory, and takers that run the real _table.c on it, one access to shared memory at a time.
 *
 * Takers are coroutines of one thread.  YIELD, which comes before each access to shared memory, hands over to the
 * scheduler where the word is one that others may change: a slot in play, the watermark, spare_until.  Counters and
 * nonces are no such places: nobody decides on another's.  Clocks are virtual. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <ucontext.h>

static void touch(const void *word);
static int virtual_clock(struct timespec *t);
#define YIELD(word) touch(word)
#define clock_gettime(id, t) ((void)(id), virtual_clock(t))
#include "_table.c"

#include "scenarios.h"

enum { SECOND = 1000000, STACK = 16384, RED_ZONE = 128 };

struct view {                              /* of the call under way, for the oracle */
    int64_t number, under_way, asked, looked; /* `looked`: the watermark when I looked at it last */
    int64_t wrote;                         /* bits of the regions and header words that the call changed */
    int64_t denies, allows;                /* at some moment of the call the true bucket did, */
    int64_t slotless, missed;              /* the key had no slot; none that can be reset; */
    int64_t in_spare_slot, crowded;        /* only a spare slot; no slot, and found none */
};

struct taker {
    _Alignas(64) char stack[STACK];
    jmp_buf entry, at;                     /* where it begins, and where it is */
    const void *word;                      /* what it touches next */
    uint64_t hash;                         /* of stack and registers; 0: not known yet */
    char *low;                             /* end of the stack in use */
    int op, begun;
    enum { READY, ENDED, DEAD } state;
    struct table table;
    struct policy policy[KEYS];
    struct call call;
    struct view view;
};

static const struct scenario *scenario;
static struct {
    struct header header;
    struct slot place[PLACES];
} shared, first;                           /* and as every run begins */
static int64_t clock_now;
static struct taker takers[TAKERS], *current;
static jmp_buf scheduler;
static uint64_t in_play;                   /* bits of places */
static unsigned char names[KEYS][2];
static uint64_t fingerprints[KEYS];

static int virtual_clock(struct timespec *t) {
    *t = (struct timespec){clock_now, 0};
    return 0;
}

static void observe(struct taker *t);      /* oracle.h: sees what the last access changed */
static void begin(struct taker *t, const struct op *op);
static void end(struct taker *t, const struct op *op, int status);

/* ---- coroutines ---------------------------------------------------------------------------------------------------- */

static __attribute__((noinline)) void yield(struct taker *t, const void *word) {
    observe(t);
    t->word = word;
    t->low = (char *)__builtin_frame_address(0) - RED_ZONE; /* below it are the registers that were saved here */
    if (_setjmp(t->at) == 0)
        _longjmp(scheduler, 1);
}

static void touch(const void *word) {
    const struct header *header = &shared.header;
    int64_t place = (const struct slot *)word - shared.place;
    int watched = (const char *)word >= (const char *)shared.place && place < PLACES ? (int)(in_play >> place & 1)
                  : word == &header->watermark_us || word == &header->spare_until_us;
    if (!watched || !current)
        return;
    yield(current, word);
    if (word == &header->watermark_us)
        current->view.looked = (int64_t)header->watermark_us;
}

static int perform(struct taker *t, const struct op *op) {
    const unsigned char *name = names[op->key];
    t->call.policy = &t->policy[op->key];
    t->call.now_us = op->at ? (int64_t)op->at * SECOND : -1;
    switch (op->what) {
    case TAKES: return shmlimit_take(&t->call, name, 2, op->cost);
    case PEEKS: return shmlimit_peek(&t->call, name, 2, op->cost);
    case CHARGES: return shmlimit_charge(&t->call, name, 2, op->cost);
    case GIVES_BACK: return shmlimit_give_back(&t->call, name, 2, op->cost);
    case RESETS: return shmlimit_reset(&t->call, name, 2);
    default: clock_now = op->at; return 0;
    }
}

static void coroutine(void) {
    if (_setjmp(current->entry) == 0)
        _longjmp(scheduler, 1);
    const struct op *ops = scenario->ops[current - takers];
    for (current->op = 0; current->op < OPS && ops[current->op].what; current->op++) {
        const struct op *op = ops + current->op;
        if (current->op)
            yield(current, NULL);          /* another may run between two calls */
        begin(current, op);
        int status = perform(current, op);
        observe(current);
        end(current, op, status);
    }
    current->state = ENDED;
    _longjmp(scheduler, 1);
}

static void resume(struct taker *t) {
    current = t;
    t->hash = 0;
    if (_setjmp(scheduler) == 0) {
        int begun = t->begun;
        t->begun = 1;
        _longjmp(begun ? t->at : t->entry, 1);
    }
    current = NULL;
}

static void make_coroutines(void) {
    static ucontext_t context;
    for (int i = 0; i < TAKERS; i++) {
        getcontext(&context);
        context.uc_stack.ss_sp = takers[i].stack;
        context.uc_stack.ss_size = STACK;
        makecontext(&context, coroutine, 0);
        current = &takers[i];
        if (_setjmp(scheduler) == 0)
            setcontext(&context);
    }
    current = NULL;
}

/* ---- the table ------------------------------------------------------------------------------------------------------ */

static const struct limit *limit_of(int key) {
    return scenario->limit[key].quota ? &scenario->limit[key] : &scenario->limit[0];
}

static void set_policy(struct policy *p, struct table *table, const struct limit *l) {
    int64_t period = (int64_t)l->period * SECOND;
    *p = (struct policy){.table = table, .kind = l->kind, .quota = l->quota, .period_us = period, .denominator = 1,
                         .interval = period, .tolerance = l->quota * period};
    shmlimit_subkey(p, (const unsigned char *)l, sizeof *l);
}

static uint64_t word_of(const struct past *past);

/* Makes the table of the scenario. */
static void make_table(const struct scenario *s) {
    scenario = s;
    memset(&first, 0, sizeof first);
    first.header.secret[0] = 1, first.header.secret[1] = 2;
    shared = first;
    for (int i = 0; i < TAKERS; i++) {
        struct table *t = &takers[i].table;
        *t = (struct table){&shared.header, &shared.header.lanes[i], {shared.place, MAIN / BUCKET},
                            {shared.place + MAIN, MAIN / BUCKET}};
        for (int k = 0; k < KEYS; k++)
            set_policy(&takers[i].policy[k], t, limit_of(k));
    }
    for (int k = 0; k < KEYS; k++) {
        static struct call call;
        struct request r;
        call.policy = &takers[0].policy[k];
        names[k][0] = (unsigned char)k;
        r = request(&call, names[k], 2, 1, TAKE);
        fingerprints[k] = r.fingerprint;
    }
    in_play = s->free;
    for (int i = 0; i < PLACES; i++)
        if (!(in_play >> i & 1))           /* nobody's, and live for longer than anybody asks */
            first.place[i] = (struct slot){UINT64_C(0x100) + (uint64_t)i, UINT64_C(3) << 62};
    for (const struct past *past = s->before; past < s->before + PAST && past->at; past++) {
        in_play |= SLOT(past->place);
        first.place[past->place] = (struct slot){fingerprints[past->key], word_of(past)};
        if (past->place >= MAIN)
            first.header.spare_until_us = UINT64_C(200) * SECOND;
    }
}

static void reset_table(void) {
    shared = first;
    clock_now = CLOCK;
    for (int i = 0; i < TAKERS; i++) {
        struct taker *t = &takers[i];
        t->state = scenario->ops[i][0].what ? READY : ENDED;
        t->begun = t->op = 0;
        t->hash = 0;
        memset(&t->view, 0, sizeof t->view);
        memset(&t->call, 0, sizeof t->call);
    }
}
