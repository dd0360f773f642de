/* The real C code of the table under every schedule with at most k preemptions.
 *
 *   cc -O2 -std=c11 -mcx16 -U_FORTIFY_SOURCE -I shmlimit/table -o driver tests/schedule/driver.c     (no -mcx16 on arm64)
 *   ./driver                                all scenarios, each with its own k
 *   ./driver -k 9 "two hits on one slot"    more preemptions
 *   ./driver -more 1                        one more than its own k, where a scenario has one
 *   ./driver -only more                     looks for this kind of breach alone
 *   ./driver -all ...                       goes on from every state, also from those that were met before
 *   ./driver list                           the names
 *
 * Ends with 1 at the first breach, after a trace of its schedule: which taker went on, and what it touched.
 *
 * README.md, beside this file, says what is tried and what is checked.
 *
 * At every access to a word that others may change, the scheduler chooses who goes on.  To leave a taker that could go
 * on costs a preemption; when one has ended, or is killed, the next is free of charge.  Schedules are tried one after
 * the other, each from the beginning, depth first.  A state that was met before with no fewer preemptions left is not
 * gone on from again: "state" is all that can matter, shared memory, the takers' stacks and registers, and what the
 * oracle knows. */
#include "world.h"

#include "oracle.h"

enum { DEPTH = 2000, KILL = TAKERS };

static struct node {
    int choice, options;                   /* bits of what is still to be tried: run a taker, or (from KILL on) kill it */
} nodes[DEPTH];
static int depth, given;                   /* of `nodes`: how many there are, how many of them are prescribed */

static struct set {                        /* of hashes, each with a number above 0 */
    struct entry {
        uint64_t hash;
        int64_t number;
    } *entries;
    uint64_t n;
    int bits;
} met, ends;                               /* states, with the preemptions that were left + 1; how runs ended */
static uint64_t schedules;
static int remembers = 1;

/* ---- states --------------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, const void *data, size_t bytes) {
    const char *at = data;
    for (uint64_t word; bytes >= sizeof word; at += sizeof word, bytes -= sizeof word) {
        memcpy(&word, at, sizeof word);
        h = rotl(h ^ word * UINT64_C(0x9e3779b97f4a7c15), 27) * UINT64_C(0xbf58476d1ce4e5b9);
    }
    return h;
}

static uint64_t hash_taker(struct taker *t) {
    if (t->state == READY && t->begun && !t->hash)
        t->hash = mix(mix(1, t->at, sizeof t->at), t->low, (size_t)(t->stack + STACK - t->low));
    const int64_t where[] = {t->state, t->begun, t->op, (int64_t)t->hash};
    uint64_t h = mix(2, where, sizeof where);
    h = mix(h, &shared.header.lanes[t - takers].nonces, sizeof(uint64_t));
    return mix(mix(h, &t->call, sizeof t->call), &t->view, sizeof t->view);
}

/* Shared memory, and what was kept. */
static uint64_t hash_end(void) {
    const int64_t words[] = {kept_n, (int64_t)shared.header.watermark_us, (int64_t)shared.header.spare_until_us};
    uint64_t h = mix(3, words, sizeof words);
    for (uint64_t left = in_play; left; left &= left - 1)
        h = mix(h, &shared.place[__builtin_ctzll(left)], sizeof(struct slot));
    return mix(h, kept, sizeof *kept * (size_t)kept_n);
}

static uint64_t hash_state(int last, int deaths) {
    const int64_t words[] = {last, deaths, clock_now};
    uint64_t h = mix(mix(hash_end(), words, sizeof words), line_of, sizeof line_of);
    for (int i = 0; i < TAKERS; i++) {
        uint64_t taker = hash_taker(&takers[i]);
        h = mix(h, &taker, sizeof taker);
    }
    return h;
}

static struct entry *entry_of(const struct set *set, uint64_t hash) {
    uint64_t at = hash >> (64 - set->bits);
    while (set->entries[at].number && set->entries[at].hash != hash)
        at = (at + 1) & ((UINT64_C(1) << set->bits) - 1);
    return &set->entries[at];
}

static void grow(struct set *set) {
    struct set larger = {calloc(UINT64_C(2) << set->bits, sizeof *set->entries), set->n, set->bits + 1};
    if (!larger.entries)
        abort();
    for (uint64_t i = 0; set->entries && i < UINT64_C(1) << set->bits; i++)
        if (set->entries[i].number)
            *entry_of(&larger, set->entries[i].hash) = set->entries[i];
    free(set->entries);
    *set = larger;
}

/* Whether the hash is there with a number no smaller; it is now. */
static int is_known(struct set *set, uint64_t hash, int64_t number) {
    if (!set->entries || set->n > UINT64_C(1) << (set->bits - 1))
        grow(set);
    struct entry *entry = entry_of(set, hash);
    if (entry->number >= number)
        return 1;
    set->n += entry->number == 0;
    *entry = (struct entry){hash, number};
    return 0;
}

static void empty(struct set *set) {
    free(set->entries);
    *set = (struct set){NULL, 0, 9};
}

/* ---- one schedule --------------------------------------------------------------------------------------------------- */

static void trace(const struct taker *t, int choice) {
    int64_t place = (const struct slot *)t->word - shared.place;
    printf("  %s taker %d", choice >= KILL ? "kill" : "run ", (int)(t - takers));
    if (t->begun && t->word == &shared.header.watermark_us)
        printf(", at the watermark");
    else if (t->begun && t->word == &shared.header.spare_until_us)
        printf(", at spare_until");
    else if (t->begun && t->word)
        printf(", at %s %d%s", place >= MAIN ? "spare slot" : "slot", (int)place % MAIN,
               t->word == &shared.place[place].state ? " (state)" : "");
    printf("\n");
}

static void run(int preemptions) {
    int last = -1, left = preemptions, deaths = scenario->deaths;
    reset_table();
    reset_oracle();
    for (depth = 0; !breach.kind; depth++) {
        int enabled = 0;
        for (int i = 0; i < TAKERS; i++)
            enabled |= (takers[i].state == READY) << i;
        if (!enabled)
            break;
        if (depth == DEPTH) {
            breaks("endless", "the takers don't come to an end");
            break;
        }
        int goes_on = last >= 0 && enabled >> last & 1;
        struct node *node = &nodes[depth];
        if (depth >= given) {
            node->choice = goes_on ? last : __builtin_ctz((unsigned)enabled);
            node->options = goes_on && left == 0 ? 0 : enabled & ~(1 << node->choice);
            if (goes_on && deaths)
                node->options |= 1 << (KILL + last);
            if (node->options && remembers && is_known(&met, hash_state(goes_on ? last : -1, deaths), left + 1))
                return;
        }
        struct taker *t = &takers[node->choice % KILL];
        if (tracing)
            trace(t, node->choice);
        if (node->choice >= KILL) {
            mark(KILLS);
            t->state = DEAD;
            t->view.under_way = 0;
            deaths--;
            last = -1;
            continue;
        }
        left -= goes_on && node->choice != last;
        last = node->choice;
        resume(t);
    }
    if (!breach.kind)
        finish();
    is_known(&ends, hash_end(), 1);
}

/* Prescribes the next schedule; 0 when there is none. */
static int go_back(void) {
    while (depth-- > 0)
        if (nodes[depth].options) {
            nodes[depth].choice = __builtin_ctz((unsigned)nodes[depth].options);
            nodes[depth].options &= nodes[depth].options - 1;
            given = depth + 1;
            return 1;
        }
    return 0;
}

/* ---- all of them ---------------------------------------------------------------------------------------------------- */

static int search(const struct scenario *s, int preemptions) {
    make_table(s);
    empty(&met);
    empty(&ends);
    schedules = marks = 0;
    given = 0;
    do {
        run(preemptions);
        schedules++;
    } while (!breach.kind && go_back());
    printf(preemptions < ALL ? "%s: k=%d" : "%s: k=all", s->name, preemptions);
    printf(", %llu schedules, %llu states, %llu ends", (unsigned long long)schedules, (unsigned long long)met.n,
           (unsigned long long)ends.n);
    for (int i = 0; i < MARKS; i++)
        if (marks >> i & 1)
            printf("; %s", MARK_NAMES[i]);
    printf("\n");
    if (!breach.kind)
        return 0;
    tracing = 1;                           /* the same again, aloud */
    given = depth + 1;
    run(preemptions);
    printf("BREACH %s: %s\n", breach.kind, breach.text);
    return 1;
}

int main(int n, char **arguments) {
    int preemptions = -1, more = 0, some = 0, broken = 0;
    make_coroutines();
    for (int i = 1; i < n; i++) {
        const char *argument = arguments[i];
        if (strcmp(argument, "list") == 0) {
            for (size_t j = 0; j < sizeof SCENARIOS / sizeof *SCENARIOS; j++)
                printf("%s\n", SCENARIOS[j].name);
            return 0;
        }
        if (strcmp(argument, "marks") == 0) {
            for (int j = 0; j < MARKS; j++)
                printf("%s\n", MARK_NAMES[j]);
            return 0;
        }
        if (strcmp(argument, "-k") == 0 && i + 1 < n)
            preemptions = atoi(arguments[++i]);
        else if (strcmp(argument, "-more") == 0 && i + 1 < n)
            more = atoi(arguments[++i]);
        else if (strcmp(argument, "-only") == 0 && i + 1 < n)
            only = arguments[++i];
        else if (strcmp(argument, "-all") == 0)
            remembers = 0;
        else
            some = 1;
    }
    for (const struct scenario *s = SCENARIOS; s < SCENARIOS + sizeof SCENARIOS / sizeof *SCENARIOS && !broken; s++) {
        int chosen = !some;
        for (int i = 1; i < n; i++)
            chosen |= strcmp(arguments[i], s->name) == 0;
        if (chosen)
            broken = search(s, preemptions >= 0 ? preemptions : s->preemptions + more);
    }
    return broken;
}
