# The driver: one bash per container that runs commands for the host. driver.py has the protocol and the reasons.
# The host puts ae_work (folder of commands), ae_roots (mounts that a reset empties) and ae_meta (what find prints of
# them when nobody has touched them) before this text. Nearly all is done by builtins: a fork costs more than the rest.

exec 2>/dev/null
set -m # every command gets a process group of its own, without an exec of setsid
umask 022
cd /
trap : PIPE # a dead watchdog must not end this shell; a handler, unlike SIG_IGN, is not inherited by commands
ae_lc_set=${LC_ALL+x} ae_lc=${LC_ALL-}
unset LC_ALL
LC_ALL=C # here bytes are characters; not exported, so that commands keep the locale of the image
rm -rf /run/out/pause
mkfifo -m 600 /run/out/pause
exec 8<>/run/out/pause # nobody writes it: to read it with a limit is to sleep without a fork

ae_sleep() { read -r -t "$1" -u 8 _; }

# Told "pid seconds" when a command starts and one line when it has ended; answers "ok" or "late".
ae_watch() {
  local pid limit line
  while IFS=' ' read -r pid limit; do
    if IFS= read -r -t "$limit" line; then
      [[ $line == stopped ]] && kill -KILL -- "-$pid"
      echo ok
    else
      kill -TERM -- "-$pid"
      IFS= read -r -t 1 line || { kill -KILL -- "-$pid" "$pid"; IFS= read -r line; }
      kill -KILL -- "-$pid"
      echo late
    fi
  done
}

ae_start_watchdog() {
  exec 3>&- 4<&-
  coproc AE_WATCH { exec 8<&-; ae_watch; }
  exec 3>&"${AE_WATCH[1]}" 4<&"${AE_WATCH[0]}"
}

# $1 state, $2 exit code, $3 bytes in all, $4 payload.
ae_reply() { printf '\001%s %s %s %s\001%s\001%s\001' "$ae_tag" "$1" "$2" "$3" "${4-}" "$ae_tag"; }

# As ae_reply for a payload from fd 7, whole up to $4 bytes, else $5 from its head and its tail: two external commands.
ae_reply_file() {
  printf '\001%s %s %s %s\001' "$ae_tag" "$1" "$2" "$3"
  if (($3 <= $4)); then head -c "$3" <&7; else head -c "$5" <&7; tail -c "$5" <&7; fi
  printf '\001%s\001' "$ae_tag"
}

# $1 bytes of fd 9. The command may have taken all processes, and a fork that fails ends this shell: builtins alone do
# it, unless there are so many NUL bytes that they would be slow.
ae_copy() {
  local left=$1 nuls part
  for ((nuls = 0; left > 0 && nuls < 100; nuls++)); do
    IFS= read -r -d '' -n "$left" -u 9 part || { printf %s "$part"; return; }
    printf %s "$part"
    ((left -= ${#part}))
    if ((left > 0)); then printf '\0'; ((left--)); fi
  done
  ((left > 0)) && head -c "$left" <&9
}

# While command $1 runs: what it writes, in parts, up to $2 bytes. A command that is stopped is not waited for.
ae_show() {
  local at=0 size=0 stat running=1
  exec 9</proc/self/fd/5
  while ((at < $2)); do
    IFS= read -r stat </proc/$1/stat && [[ ${stat##*) } != [TZ]* ]] || running=
    IFS=$' \t' read -r _ size </proc/self/fdinfo/5
    ((size > $2)) && size=$2
    if ((size > at)); then
      printf '\001%s more 0 %s\001' "$ae_tag" "$size"
      ae_copy $((size - at))
      printf '\001%s\001' "$ae_tag"
      at=$size
    fi
    [[ $running ]] || break
    ae_sleep 0.2
  done
  exec 9<&-
}

# $1 seconds, $2 bytes from head and tail each, $3 number of the command, $4 length of the command, which follows,
# $5 bytes of output to show while it runs.
ae_run() {
  local cmd out=/run/out/$3 pid code state total text=
  IFS= read -r -N "$4" cmd
  if ! { exec 5>>"$out" 6<"$out" 7<"$out"; }; then
    ae_reply refused 0 0
    return
  fi
  (
    if [[ $ae_lc_set ]]; then export LC_ALL="$ae_lc"; else unset LC_ALL; fi
    cd -- "$ae_work"
    unset OLDPWD
    exec bash -c "$cmd" </dev/null >&5 2>&1 3>&- 4<&- 5>&- 6<&- 7<&- 8<&-
  ) &
  # In the background, since bash ends its loop after a command in the foreground that died of SIGINT. With job control
  # a background command ignores no signal, and `wait` returns when it is stopped, too.
  pid=$!
  echo "$pid $1" >&3
  (($5)) && ae_show "$pid" "$5"
  wait "$pid"
  code=$?
  # A stopped command has not ended, and nobody would ever wake it.
  if ((code >= 147 && code <= 150)); then echo stopped >&3; else echo >&3; fi
  if ! IFS= read -r -t 5 state <&4; then # the command killed or stopped the watchdog
    kill -KILL "$AE_WATCH_PID"
    ae_start_watchdog
    state=ok
  fi
  [[ $state == late ]] && ae_kill_since "$pid"
  IFS=$' \t' read -r _ total </proc/self/fdinfo/5
  if ((total <= 2 * $2 && total <= 65536)) && { ((total == 0)) || ae_slurp "$total"; }; then
    ae_reply "$state" "$code" "$total" "$text"
  else
    ae_reply_file "$state" "$code" "$total" $((2 * $2)) "$2"
  fi
  : >/proc/self/fd/5 # gives the memory back; the name stays taken, so that a process left behind cannot mix its output in
  exec 5>&- 6<&- 7<&-
}

# Exactly $1 bytes from fd 6 into text; fails where the file has NUL bytes or another length.
ae_slurp() {
  IFS= read -r -N $(($1 + 1)) -u 6 text
  ((${#text} == $1))
}

# Kill what started since process $1, sessions that escaped from its group included.
ae_kill_since() {
  local round entry alive
  for ((round = 0; round < 20; round++)); do
    alive=0
    for entry in /proc/[0-9]*; do
      entry=${entry#/proc/}
      ((entry >= $1 && entry != $$ && entry != AE_WATCH_PID)) && kill -KILL "$entry" && alive=1
    done
    ((alive)) || return 0
    ae_sleep 0.01
  done
  kill -KILL -1 # forks faster than one by one can be killed
  ae_start_watchdog
}

# What a command can change about this shell from outside (prlimit, renice, chrt, taskset), as one string in REPLY.
ae_self() {
  local stat status limits score
  IFS= read -r stat </proc/self/stat
  IFS= read -r score </proc/self/oom_score_adj
  mapfile limits </proc/self/limits
  mapfile status </proc/self/status
  [[ ${status[*]} =~ Cpus_allowed_list:[[:space:]]*([0-9,-]+) ]]
  IFS=' ' read -r -a stat <<<"${stat##*) }"
  REPLY="${stat[15]} ${stat[16]} ${stat[37]} ${stat[38]} $score ${BASH_REMATCH[1]} ${limits[*]}"
}

# Delete all below the mounts; fails where something stays, or where a mount's mode or owner is not as it was.
ae_empty() { REPLY=$(find "${ae_roots[@]}" "${ae_find[@]}") && [[ $REPLY == "$ae_meta" ]]; }

# Back to a new sandbox: $1 files follow. Ends the driver after anything odd, for the container is then thrown away.
ae_reset() {
  local round others lines file mode
  kill -KILL -1 # at once all but PID 1 and this shell: nothing can fork in between
  wait # for its own children; those that lost their parent are PID 1's to reap
  for ((round = 0; ; round++)); do
    others=(/proc/[0-9]*)
    ((${#others[@]} <= 2)) && break
    ((round > 300)) && ae_odd "processes that do not die: $(cat "${others[@]/%//stat}")"
    ((round > 5)) && kill -KILL -1 && ae_sleep 0.01
  done
  for file in /proc/sysvipc/*; do
    mapfile lines <"$file"
    ((${#lines[@]} > 1)) && ae_odd "System V objects left in $file"
  done
  ae_self
  [[ $REPLY == "$ae_self_first" ]] || ae_odd "priority, processors or limits of the driver changed"
  if ! ae_empty; then # folders without permissions stop even root, where it has no capabilities
    chmod -R u+rwx "${ae_roots[@]}"
    while IFS=' ' read -r mode _ _ file; do chmod "$mode" "$file"; done <<<"$ae_meta"
    ae_empty || ae_odd "files left, or a mount changed: $REPLY"
  fi
  ae_start_watchdog
  ae_write "$1"
}

ae_odd() {
  ae_reply odd 0 0 "$1"
  exit 1
}

# $1 files follow, each "how path_length data_length", path, data as for printf %b.
ae_write() {
  local i how path_length data_length path folder data failed=
  for ((i = 0; i < $1; i++)); do
    data=
    IFS=' ' read -r how path_length data_length
    IFS= read -r -N "$path_length" path
    ((data_length)) && IFS= read -r -N "$data_length" data
    folder=${path%/*}
    [[ -z $folder || -d $folder ]] || mkdir -p -- "$folder"
    if [[ $how == new ]]; then printf %b "$data" >"$path"; else printf %b "$data" >>"$path"; fi || failed+="$path "
  done
  if [[ $failed ]]; then ae_reply failed 0 0 "$failed"; else ae_reply ok 0 0; fi
}

# $1 bytes at most, $2 length of the path, which follows.
ae_read() {
  local path
  IFS= read -r -N "$2" path
  if [[ -f $path ]] && exec 7<"$path"; then
    ae_reply_file ok 0 "$1" "$1" 0
    exec 7<&-
  else
    ae_reply missing 0 0
  fi
}

# What command $1 wrote before the channel was lost; $2 bytes from head and tail each.
ae_recover() {
  local out=/run/out/$1 total
  if [[ -f $out ]] && exec 7<"$out"; then
    total=$(stat -L -c %s /dev/fd/7)
    ae_reply_file ok 0 "${total:-0}" $((2 * $2)) "$2"
    exec 7<&-
  else
    ae_reply missing 0 0
  fi
}

for ((ae_round = 0; ae_round < 500; ae_round++)); do # a container that has just started
  read -r ae_name </proc/1/comm
  [[ $ae_name == init ]] && break
  ae_sleep 0.01
done
rm -rf /run/out/driver /run/out/pause /run/out/init /run/out/init.wait # the programs run on without their names
ae_find=(\()
for ae_root in "${ae_roots[@]}"; do ae_find+=(-path "$ae_root" -o); done
ae_find[-1]=\)
ae_find+=(-printf '%m %U %G %p\n' -o -delete)
ae_self
ae_self_first=$REPLY
ae_start_watchdog

while IFS=' ' read -r ae_op ae_tag ae_a ae_b ae_c ae_d ae_e; do
  case $ae_op in
    run) ae_run "$ae_a" "$ae_b" "$ae_c" "$ae_d" "$ae_e" ;;
    reset) ae_reset "$ae_a" ;;
    write) ae_write "$ae_a" ;;
    read) ae_read "$ae_a" "$ae_b" ;;
    recover) ae_recover "$ae_a" "$ae_b" ;;
    ping) ae_reply ok 0 0 ;;
  esac
done
