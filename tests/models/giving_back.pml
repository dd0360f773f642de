/* How a charge is given back to a bucket of the shared table, as a model: one key, or two, that have a slot; GCRA.
 *
 *   spin -DTMAX=3 -DKEEPERS=2 -a giving_back.pml
 *   cc -w -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=4000 -o pan pan.c && ./pan -m100000
 *
 * README.md, beside this file, says what is modelled, what is left out and which configurations are run.
 *
 * st[k] is the state of key k: its theoretical arrival time, 0 where there is none.  An atomic block touches what is
 * shared once: one load, one swap or one reading of the clock.  All else in it is the taker's own, or the ghost's.
 *
 * A request is judged as of a time that its taker read before it loaded the state, perhaps long before: so that is any
 * time that the clock has shown by then, and it is chosen where the state is loaded.  A taker whose swap was lost asks
 * again as of any time and for any cost, which is what a new taker would do.
 *
 * ghost[k] is the arrival time of the bucket that took the kept requests of key k and no others, in the order of their
 * swaps.  A request may only be kept where this bucket allows it: never more.  Whether a charge is going to be kept is
 * guessed where it is made.  A run that guessed wrong ends there, as if the taker were killed, so no run is left out.
 */
#ifndef NK
#define NK 1            /* keys; if 2, a giver charges both, in either order, and keeps both or none */
#endif
#ifndef P
#define P 2             /* emission interval */
#endif
#ifndef B
#define B 2             /* burst */
#endif
#ifndef CMAX
#define CMAX 1          /* costs are 1 to CMAX <= B */
#endif
#ifndef TMAX
#define TMAX 4          /* the clock shows 1 to TMAX */
#endif
#ifndef GIVERS
#define GIVERS 2        /* takers that keep what they charged or, at any time later, give it back */
#endif
#ifndef KEEPERS
#define KEEPERS 1       /* takers that keep, one request after another ... */
#endif
#ifndef EACH
#define EACH 3          /* ... this many */
#endif
#ifndef REACH
#define REACH 0         /* the REACHED mark at which the search is to fail */
#endif

#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define ALLOWS(tat, t, c) ((tat) + (c) * P <= (t) + B * P)
#define LEFT(until) MIN(charge, MAX(until, now) - now)           /* of a charge that has run out at `until` */
#define REACHED(n) assert(REACH != n)

#ifdef EXPLICIT         /* all callers give the time: any, in any order */
#define SHOWN TMAX
#else
#define SHOWN clock
#endif
#ifdef AHEAD            /* only the keepers' callers do */
#define SHOWN_KEEPER TMAX
#else
#define SHOWN_KEEPER SHOWN
#endif
#if defined(STAMPED) || defined(OLDWORD)
#define OLD
#endif

byte st[NK], ghost[NK];
byte clock = 1;
#ifdef ONEATATIME
byte giving[GIVERS + 1];                         /* the key (counted from 1) that a giver says it is giving back to */
#endif
#ifdef FORGET
byte watermark;
#endif
#if TMAX == 1
byte held[NK];          /* what was charged and neither kept nor given back */
byte last[NK];          /* the giver that stored last, 0: a keeper */
#endif
#if REACH
byte held_n, back_n;    /* charges that may be given back; how many were, after another's charge came between */
bool came, forgot;
#endif

/* Loads the state of key x, and chooses the request: as of t, of cost c. */
inline ask(x, shown) {
  s = st[x];
  t = 1;
  do
  :: t < shown -> t++
  :: break
  od;
#if CMAX > 1
  do
  :: c < CMAX -> c++
  :: break
  od;
#endif
  skip
}

/* A forgotten key comes back as of no earlier time.  The watermark is read while the key is reserved, which claim.pml
 * has as a step of its own: nobody else can commit the key, or forget it, between this reading and the swap. */
inline raise() {
#ifdef FORGET
  if
  :: s == 0 -> t = MAX(t, watermark)
  :: else
  fi;
#endif
  skip
}

/* The ghost's look at a request that a swap is about to take for good. */
inline keep(x) {
  assert(ALLOWS(ghost[x], t, c));                /* never more */
  ghost[x] = MAX(ghost[x], t) + c * P;
#if REACH
  came = came || held_n >= 2;
#endif
}

/* The ghost's look at what was stored. */
inline stored(x, me) {
#if TMAX == 1
  last[x] = me;
#endif
#ifndef ONLYMORE        /* for the ablations: they must break the limit itself */
  assert(st[x] >= ghost[x]);                     /* what was kept isn't given back */
#if TMAX == 1
  assert(MAX(st[x], 1) == MAX(ghost[x], 1) + held[x] * P);       /* nothing is lost that isn't held */
#endif
#endif
  skip
}

proctype keeper(byte n) {
  byte x, s, t, c = 1;
again:
  if
  :: n == 0 -> goto done
  :: n > 0
  fi;
#if NK > 1
  if
  :: x = 0
  :: x = 1
  fi;
#endif
  atomic {
    ask(x, SHOWN_KEEPER);
    if
    :: ALLOWS(s, t, c) -> skip
    :: !ALLOWS(s, t, c) -> goto done             /* a denial changes nothing */
    fi
  };
  atomic {
    if
    :: st[x] == s -> raise(); keep(x); st[x] = MAX(s, t) + c * P; stored(x, 0); n--
    :: else -> REACHED(1)
    fi;
    s = 0; t = 0; c = 1; goto again
  };
done:
  atomic { n = 0; x = 0; s = 0; t = 0; c = 0 }
}

proctype giver(byte me; byte x) {
  byte s, t, c = 1;
  byte stamp, charge, word;                      /* as of when I charged key x, how much, and the state that I left */
  bool kept;
  byte now, g, i;
#if NK > 1
  byte y = 1 - x;                                /* the key that I charge second */
#endif
#ifdef OLD
  byte old;
#endif

charge_first:
  atomic {
    ask(x, SHOWN);
    if
    :: ALLOWS(s, t, c) -> skip
    :: !ALLOWS(s, t, c) -> goto done
    fi
  };
  atomic {
    if
    :: st[x] == s ->
       raise();
       if
       :: kept = true; keep(x)
       :: kept = false
       fi;
       st[x] = MAX(s, t) + c * P; stamp = t; charge = c * P; word = st[x];
#ifdef OLD
       old = s;
#endif
#if TMAX == 1
       held[x] = held[x] + (kept -> 0 : c);
#endif
#if REACH
       held_n = held_n + (kept -> 0 : 1);
#endif
       stored(x, me);
       s = 0; t = 0; c = 1
    :: else -> s = 0; t = 0; c = 1; goto charge_first
    fi
  };

#if NK > 1
charge_second:
  atomic {
    ask(y, SHOWN);
    if
    :: ALLOWS(s, t, c) && kept -> skip
    :: !ALLOWS(s, t, c) && !kept -> s = 0; t = 0; c = 1; goto back
    :: else -> goto done                         /* guessed wrong */
    fi
  };
  atomic {
    if
    :: st[y] == s -> keep(y); st[y] = MAX(s, t) + c * P; stored(y, me); REACHED(2); goto done
    :: else -> s = 0; t = 0; c = 1; goto charge_second
    fi
  };
#else
  if
  :: kept -> goto done
  :: !kept
  fi;
#endif

back:
#ifdef ONEATATIME
  atomic { giving[me] = x + 1; i = 1 };          /* say so, and only then see whether another does */
  do
  :: atomic { i > GIVERS -> i = 0; break }
  :: atomic { i <= GIVERS && (i == me || giving[i] != x + 1) -> i++ }
  :: atomic { i <= GIVERS && i != me && giving[i] == x + 1 -> REACHED(3); goto said }
  od;
#endif
load:
#ifdef CLOCKEARLY
  now = clock;
#endif
  atomic {
    s = st[x];
    if
    :: s == 0 -> REACHED(4); goto said           /* forgotten */
    :: s > 0
    fi;
#if REACH
    assert(REACH != 5 || s >= word);             /* another has given back what it charged before me */
#endif
#if !defined(BYCLOCK) && !defined(NOGUARD)
    if
    :: s != word ->                              /* what can't be given back stays charged */
#if TMAX == 1
       assert(last[x] != me);                    /* somebody came */
#endif
       REACHED(6); goto said
    :: s == word
    fi
#endif
  };
#ifndef BYCLOCK
  g = charge;
#else
  atomic {
#ifndef CLOCKEARLY
    now = clock;
#endif
#if defined(ALL)
    g = charge;
#elif defined(STAMPED)
    g = LEFT(MAX(old, stamp) + charge);
#elif defined(OLDWORD)
    g = (s == word -> charge : LEFT(stamp + charge));
#elif defined(MIXED)
    if
    :: me == 1 && s == word -> g = charge        /* its caller gave the time, and it was the clock's */
    :: me == 1 && s != word -> goto said
    :: me != 1 -> g = LEFT(stamp + charge)
    fi;
#else
    g = LEFT(stamp + charge);
#endif
#if REACH
    assert(REACH != 7 || g == 0 || g == charge); /* some of it has run out */
#endif
    if
    :: g == 0 -> REACHED(8); goto said           /* all of it has run out */
    :: g > 0
    fi
  };
#endif
  atomic {
    if
    :: st[x] == s ->
       assert(g <= s);
       st[x] = s - g;
#if TMAX == 1
       held[x] = held[x] - charge / P;
#endif
       stored(x, me);
#ifndef ONLYMORE
       assert(g == charge || clock > stamp);     /* all of it while no time passed */
#endif
#if REACH
       back_n = back_n + came;
       assert(REACH != 9 || back_n < 2);
       assert(REACH != 10 || !came);
       assert(REACH != 11 || !forgot);
#endif
       goto said
    :: else -> REACHED(12); s = 0; now = 0; g = 0; goto load
    fi
  };
said:
#ifdef ONEATATIME
  giving[me] = 0;
#endif
done:
  atomic {
    x = 0; s = 0; t = 0; c = 0; stamp = 0; charge = 0; word = 0; kept = 0; now = 0; g = 0; i = 0;
#ifdef OLD
    old = 0;
#endif
#if NK > 1
    y = 0;
#endif
    me = 0
  }
}

/* Time passes, and what has expired may be forgotten. */
proctype world() {
end:
  do
  :: atomic { clock < TMAX -> clock++ }
#ifdef FORGET
  :: atomic { st[0] > 0 && st[0] <= clock ->
       watermark = MAX(watermark, st[0]); st[0] = 0;
#if REACH
       forgot = true
#endif
     }
#endif
  od
}

init {
  byte i;
  atomic {
#ifdef EXPLICIT
    clock = TMAX;
#endif
    run world();
    do
    :: i < KEEPERS -> i++; run keeper(EACH)
    :: i == KEEPERS -> break
    od;
    i = 0;
    do
    :: i < GIVERS -> i++; run giver(i, (NK > 1 -> (i - 1) % NK : 0))
    :: i == GIVERS -> i = 0; break
    od
  }
}
