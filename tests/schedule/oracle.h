/* What must hold, judged by what was seen to change in memory.  Knows nothing of judge(): the true state of a key is
 * made anew from the list of its kept requests, with the times that they were judged as of, in the order of their swaps. */

enum { MAX_KEPT = 24 };
enum { WROTE_SLOT = 1, WROTE_SPARE = 2, WROTE_HEADER = 4 };

static struct kept {
    int key, taker, in_spare, final;       /* not final: charged to a spare slot by a call that goes on */
    int64_t number, at, late, cost;        /* `late`: as `at`, and see keep() */
} kept[MAX_KEPT];
static int kept_n, exact;
static struct {
    int64_t reached;                       /* the latest time that anything of the key was charged as of */
    int64_t inherits;                      /* its slot began with the state of a spare slot: it may get less */
} line_of[KEYS];
static struct slot seen[PLACES];
static uint64_t seen_watermark, seen_until;

enum mark { RESERVES, CLEARS, COMMITS_OTHERS, RAISES, HITS, FORGETS, TAKES_DEAD, IS_RESET, BACK, NOT_BACK,
            LOSES, DENIES, IS_FULL, KILLS, CHARGES_SPARE, UNDOES, LEAVES, CLAIMS_ON_SPARE, SPARE_DENIES,
            FORGETS_SPARE, CLEARS_FOR_SPARE, MARKS };
static const char *const MARK_NAMES[MARKS] = {
    [RESERVES] = "reserved", [CLEARS] = "reservation cleared",
    [COMMITS_OTHERS] = "another's reservation committed", [RAISES] = "committed as of the watermark",
    [HITS] = "hit", [FORGETS] = "forgotten", [TAKES_DEAD] = "dead reservation taken", [IS_RESET] = "reset",
    [BACK] = "given back", [NOT_BACK] = "not given back", [LOSES] = "swap lost", [DENIES] = "denied",
    [IS_FULL] = "full", [KILLS] = "killed", [CHARGES_SPARE] = "spare slot charged",
    [UNDOES] = "spare slot's charge undone", [LEAVES] = "spare slot's charge left",
    [CLAIMS_ON_SPARE] = "claimed on a spare slot", [SPARE_DENIES] = "denied by a spare slot",
    [FORGETS_SPARE] = "spare slot forgotten", [CLEARS_FOR_SPARE] = "reservation cleared for a spare slot",
};
static uint64_t marks;
static inline void mark(enum mark m) { marks |= UINT64_C(1) << m; }

static const char *only;                   /* the kind of breach that counts; NULL: any */
static struct { const char *kind, *text; } breach;
static int tracing;

static void breaks(const char *kind, const char *text) {
    if (breach.kind || (only && strcmp(only, kind) != 0))
        return;
    breach.kind = kind, breach.text = text;
    if (current)
        _longjmp(scheduler, 1);
}

/* ---- the true state of a key ---------------------------------------------------------------------------------------- */

struct bucket {
    int64_t until;                         /* GCRA: when it is full again */
    int64_t window, previous, current;     /* windows: the number of the last, and the counts */
};

/* Takes `cost` as of `at` (microseconds) if it fits. */
static int pour(const struct limit *l, struct bucket *b, int64_t at, int64_t cost) {
    int64_t period = (int64_t)l->period * SECOND, window = at / period, weight = 0;
    if (l->kind == GCRA) {
        int64_t until = (b->until > at ? b->until : at) + cost * period;
        if (until - at > l->quota * period)
            return 0;
        b->until = until;
        return 1;
    }
    struct bucket to = *b;
    if (window > b->window)
        to = (struct bucket){0, window, window == b->window + 1 ? b->current : 0, 0};
    if (l->kind == SLIDING) {
        int64_t left = (to.window + 1) * period - (at > to.window * period ? at : to.window * period);
        weight = (to.previous * left + period - 1) / period;
    }
    if (weight + to.current + cost > l->quota)
        return 0;
    to.current += cost;
    *b = to;
    return 1;
}

/* The state after all that was kept of a key; 0 if not all of it fits. */
static int fold(int key, int late, struct bucket *b) {
    *b = (struct bucket){0};
    for (const struct kept *e = kept; e < kept + kept_n; e++)
        if (e->key == key && e->final && !pour(limit_of(key), b, late ? e->late : e->at, e->cost))
            return 0;
    return 1;
}

static uint64_t encode(const struct limit *l, const struct bucket *b) {
    uint64_t end_ms = (uint64_t)((b->window + 1) * l->period) * 1000, period_ms = (uint64_t)l->period * 1000;
    if (l->kind == GCRA)
        return UINT64_C(1) << 63 | (uint64_t)b->until << 11;
    if (l->kind == FIXED)
        return UINT64_C(2) << 61 | end_ms << 19 | (uint64_t)b->current;
    return UINT64_C(2) << 60 | (end_ms + period_ms) << 18 | (uint64_t)b->previous << 9 | (uint64_t)b->current;
}

/* When a committed word is nothing any more. */
static int64_t expires(uint64_t state) {
    if (state >> 63)
        return (int64_t)(state << 1 >> 12);
    return (int64_t)(state >> 61 == 2 ? state << 3 >> 22 : state << 4 >> 22) * 1000;
}

static int is_committed(struct slot s) { return s.state >> 61 != 0; }
static int is_held(struct slot s) { return s.state != 0 && s.state >> 61 == 0; } /* by a reservation */

static int in_use(struct slot s, int64_t asked) {
    return is_committed(s) ? expires(s.state) > asked : is_held(s) && clock_now - (int64_t)(s.state >> 19) / 1000 < 1;
}

static uint64_t word_of(const struct past *past) {
    struct bucket b = {0};
    if (past->cost == 0)
        return (uint64_t)past->at * 1000 << 19 | UINT64_C(59) << 13;
    pour(limit_of(past->key), &b, (int64_t)past->at * SECOND, past->cost);
    return encode(limit_of(past->key), &b);
}

static void reset_oracle(void) {
    exact = !scenario->shares;
    kept_n = 0;
    memset(line_of, 0, sizeof line_of);
    for (const struct past *past = scenario->before; past < scenario->before + PAST && past->at; past++) {
        int64_t at = (int64_t)past->at * SECOND;
        line_of[past->key].reached = at;
        if (past->cost)
            kept[kept_n++] = (struct kept){past->key, -1, past->place >= MAIN, 1, 0, at, at, past->cost};
    }
    for (int i = 0; i < TAKERS; i++)
        for (int j = 0; j < OPS; j++)
            exact = exact && scenario->ops[i][j].what != GIVES_BACK;
    memcpy(seen, first.place, sizeof seen);
    seen_watermark = first.header.watermark_us, seen_until = first.header.spare_until_us;
    memset(&breach, 0, sizeof breach);
}

/* ---- what changed --------------------------------------------------------------------------------------------------- */

enum form { ANY, COMMITTED, HELD };

/* The first place in play of a region that has the fingerprint; -1: none. */
static int place_of(int spare, uint64_t fingerprint, enum form form) {
    for (uint64_t left = in_play >> spare * MAIN & (SLOT(MAIN) - 1); left; left &= left - 1) {
        int i = spare * MAIN + __builtin_ctzll(left);
        struct slot s = shared.place[i];
        if (s.fingerprint == fingerprint && (form == ANY ? s.state != 0 : form == HELD ? is_held(s) : is_committed(s)))
            return i;
    }
    return -1;
}

/* Notes what could be the answer to a call at this moment. */
static void moment(struct taker *t) {
    struct view *v = &t->view;
    const struct op *op = &scenario->ops[t - takers][t->op];
    struct bucket b, other;
    int at = place_of(0, fingerprints[op->key], COMMITTED), free = 0;
    fold(op->key, 1, &b);
    other = b;
    int fits = pour(limit_of(op->key), &b, v->asked, op->cost);
    int64_t raised = at < 0 ? (int64_t)shared.header.watermark_us : 0;
    v->denies |= !fits || line_of[op->key].inherits;
    v->allows |= fits || (raised > v->asked && pour(limit_of(op->key), &other, raised, op->cost));
    v->slotless |= at < 0;
    int spare = place_of(1, fingerprints[op->key], COMMITTED);
    v->missed |= at < 0 || expires(shared.place[at].state) <= v->asked;
    v->missed |= spare >= 0 && expires(shared.place[spare].state) > v->asked;
    v->in_spare_slot |= at < 0 && spare >= 0;
    for (int i = 0; i < MAIN; i++)
        free |= in_play >> i & 1 && !in_use(shared.place[i], v->asked);
    v->crowded |= !free && place_of(0, fingerprints[op->key], ANY) < 0;
}

/* Who comes late with an old time is counted in the window that was written, if it is one that is among what is kept.
 * The line may also be that of a charge that was given back since: then `at` is the time that was asked, as if there had
 * been no charge, for the question whether too much was allowed, and `late` in the window, for whether too little was. */
static void keep(struct taker *t, int key, int in_spare, int64_t at, int64_t cost, uint64_t word) {
    const struct limit *l = limit_of(key);
    int64_t period = (int64_t)l->period * SECOND, late = at, newest = 0;
    int64_t line = l->kind == GCRA ? 0 : expires(word) - (l->kind == SLIDING ? 2 : 1) * period;
    for (const struct kept *e = kept; e < kept + kept_n; e++)
        if (e->key == key && e->at > newest)
            newest = e->at;
    if (line > at && line <= line_of[key].reached)
        late = line;
    if (line > at && line <= newest)
        at = line;
    if (kept_n == MAX_KEPT)
        abort();
    line_of[key].reached = late > line_of[key].reached ? late : line_of[key].reached;
    kept[kept_n++] = (struct kept){key, (int)(t - takers), in_spare, !in_spare, t->view.number, at, late, cost};
}

static void drop(int i) {
    memmove(kept + i, kept + i + 1, sizeof *kept * (size_t)(--kept_n - i));
}

/* A reset forgets what was kept so far. */
static void drop_all(int key) {
    for (int i = kept_n; i-- > 0;)
        if (kept[i].key == key && kept[i].final)
            drop(i);
}

/* A taker gives back what it charged last. */
static void drop_last(int key, int taker, int in_spare) {
    for (int i = kept_n; i-- > 0;)
        if (kept[i].key == key && kept[i].taker == taker && kept[i].in_spare == in_spare) {
            drop(i);
            return;
        }
}

static void changed(struct taker *t, int i, struct slot was, struct slot is) {
    const struct op *op = &scenario->ops[t - takers][t->op];
    int spare = i >= MAIN, own = was.fingerprint == is.fingerprint;
    uint64_t fingerprint = fingerprints[op->key];
    struct view *v = &t->view;
    int64_t raised = v->looked > v->asked ? v->looked : v->asked;
    v->wrote |= spare ? WROTE_SPARE : WROTE_SLOT;
    if (tracing)
        printf("      %s %d: %llx %016llx -> %llx %016llx\n", spare ? "spare slot" : "slot", i % MAIN,
               (unsigned long long)was.fingerprint >> 48, (unsigned long long)was.state,
               (unsigned long long)is.fingerprint >> 48, (unsigned long long)is.state);
    if (is.state == 0) {
        if (was.fingerprint != fingerprint || is.fingerprint != 0)
            breaks("wrote", "emptied a slot of another key");
        if (is_held(was)) {
            mark(kept_n && !kept[kept_n - 1].final && kept[kept_n - 1].taker == t - takers ? CLEARS_FOR_SPARE : CLEARS);
        } else if (op->what == RESETS) {
            mark(IS_RESET);
            drop_all(op->key);
        } else {
            breaks("wrote", "emptied a slot with a state");
        }
        return;
    }
    if (is.fingerprint != fingerprint)
        breaks("wrote", "wrote a state of another key");
    if (is_held(is)) {
        if (in_use(was, spare ? raised : v->asked))
            breaks("wrote", "reserved a slot that was in use");
        mark(is_committed(was) ? spare ? FORGETS_SPARE : FORGETS : is_held(was) ? TAKES_DEAD : RESERVES);
        return;
    }
    if (!own || was.state == 0)
        breaks("wrote", "stored a state without a reservation");
    if (is_held(was)) {
        if ((int64_t)(was.state >> 13 & 63) != t - takers)
            mark(COMMITS_OTHERS);
        if (raised > v->asked)
            mark(RAISES);
        if (!spare)
            line_of[op->key].inherits = t->call.shared;
        if (!spare && t->call.shared)
            mark(CLAIMS_ON_SPARE);
        if (spare)
            mark(CHARGES_SPARE);
        keep(t, op->key, spare, raised, op->cost, is.state);
    } else if (op->what == GIVES_BACK || is.state < was.state) {
        mark(op->what == GIVES_BACK ? BACK : UNDOES);
        drop_last(op->key, (int)(t - takers), spare);
    } else {
        mark(spare ? CHARGES_SPARE : HITS);
        keep(t, op->key, spare, spare ? raised : v->asked, op->cost, is.state);
    }
    for (int j = spare * MAIN; j < (spare + 1) * MAIN; j++)
        if (j != i && shared.place[j].fingerprint == is.fingerprint && is_committed(shared.place[j]))
            breaks("twice", "two committed slots for one fingerprint");
}

static void observe(struct taker *t) {
    int any = 0;
    for (uint64_t left = in_play; left; left &= left - 1) {
        int i = __builtin_ctzll(left);
        struct slot was = seen[i], is = shared.place[i];
        if (was.fingerprint == is.fingerprint && was.state == is.state)
            continue;
        any = 1;
        seen[i] = is;
        changed(t, i, was, is);
    }
    if (seen_watermark != shared.header.watermark_us || seen_until != shared.header.spare_until_us) {
        if (shared.header.watermark_us < seen_watermark || shared.header.spare_until_us < seen_until)
            breaks("wrote", "lowered a word of the header");
        seen_watermark = shared.header.watermark_us, seen_until = shared.header.spare_until_us;
        t->view.wrote |= WROTE_HEADER;
        any = 1;
    }
    for (int i = 0; any && i < TAKERS; i++)
        if (takers[i].view.under_way)
            moment(&takers[i]);
}

/* ---- calls ---------------------------------------------------------------------------------------------------------- */

static void begin(struct taker *t, const struct op *op) {
    t->view = (struct view){.number = t->op + 1, .under_way = 1};
    t->view.asked = (op->at ? op->at : clock_now) * (int64_t)SECOND;
    moment(t);
}

/* Of what a call charged, the last stays if it is allowed; what can't be given back is nobody's request. */
static int settle(const struct taker *t, int allowed) {
    int main_n = 0, n = 0;
    for (int i = kept_n; i-- > 0;) {
        if (kept[i].number != t->view.number || kept[i].taker != t - takers)
            continue;
        main_n += !kept[i].in_spare;
        if (allowed && n++ == 0) {
            kept[i].final = 1;
        } else if (kept[i].in_spare) {
            mark(LEAVES);
            drop(i);
        }
    }
    return allowed ? n > 0 && main_n <= 1 : main_n == 0;
}

static void end(struct taker *t, const struct op *op, int status) {
    struct view *v = &t->view;
    v->under_way = 0;
    if (tracing)
        printf("      returns %d, %s%s%s\n", status, t->call.allowed ? "allowed" : "denied",
               t->call.shared ? " by its spare slot" : "", t->call.full ? ", full" : "");
    if (shared.header.lanes[t - takers].contended)
        mark(LOSES);
    if (status < 0)
        breaks("answer", "a call had no answer");
    if (op->what == GIVES_BACK)
        mark(status ? BACK : NOT_BACK);
    if (op->what == RESETS && status == 0 && !v->missed)
        breaks("less", "a reset found no live state, and there was one all the time");
    if (op->what != TAKES && op->what != CHARGES && op->what != PEEKS)
        return;
    if (op->what == PEEKS) {
        if (v->wrote)
            breaks("wrote", "a peek wrote");
        if (t->call.allowed && !v->allows)
            breaks("answer", "a peek said allowed, and no moment of the call did");
    } else if (!settle(t, t->call.allowed)) {
        breaks(t->call.allowed ? "more" : "wrote", t->call.allowed ? "allowed without a charge" : "charged and denied");
    }
    if (t->call.allowed)
        return;
    mark(t->call.full ? IS_FULL : t->call.shared ? SPARE_DENIES : DENIES);
    if (!v->denies && !(t->call.full && v->crowded) && !(t->call.shared && v->in_spare_slot))
        breaks("less", t->call.full ? "no room, and the key had some at every moment of the call"
                                    : "denied, and the true bucket had room at every moment of the call");
    if (!v->slotless && v->wrote)
        breaks("wrote", "a denial wrote, and the key had a slot all the time");
}

/* All have ended or are dead. */
static void finish(void) {
    int killed = 0;
    for (int i = 0; i < TAKERS; i++)
        killed |= takers[i].state == DEAD;
    for (int i = kept_n; i-- > 0;)
        if (!kept[i].final)
            drop(i);
    for (int k = 0; k < KEYS; k++) {
        struct bucket b;
        if (!fold(k, 0, &b))
            breaks("more", "a key was allowed what the bucket of its kept requests refuses");
        int at = place_of(0, fingerprints[k], COMMITTED);
        uint64_t word = encode(limit_of(k), &b);
        if (at >= 0 && (exact ? shared.place[at].state != word : shared.place[at].state < word))
            breaks("lost", "the state isn't that of the kept requests");
        if (at >= 0 && !killed && place_of(0, fingerprints[k], HELD) >= 0)
            breaks("left", "a key has a slot, and a reservation besides");
        if (at < 0 && exact && (b.until || b.window) && expires(word) > (int64_t)shared.header.watermark_us)
            breaks("lost", "a key has no state, and it wasn't published that it was forgotten");
    }
    for (int i = 0; i < PLACES; i++)
        if (!(in_play >> i & 1) && memcmp(&shared.place[i], &first.place[i], sizeof(struct slot)) != 0)
            breaks("wrote", "changed a slot of nobody");
}
