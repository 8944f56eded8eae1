# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
# Written by fsdp2-ckpt --bash-completion.
_fsdp2_ckpt() {
  local word=${COMP_WORDS[COMP_CWORD]} words=""
  case ${COMP_WORDS[1]} in
    inspect) words="-h --help --tensors --ranks --json --html" ;;
    verify) words="-h --help --quick --progress -q --quiet --json" ;;
    reshard) words="-h --help --world-size --mesh --ranks-per-file --rank-local --include --exclude --cast --memory --progress --overwrite --dry-run -q --quiet --json" ;;
    diff) words="-h --help --rtol --atol --memory --json" ;;
    list) words="-h --help --json" ;;
    prune) words="-h --help --keep-last --keep-every --partials --dry-run --json" ;;
    export) words="-h --help --max-shard-size --include --exclude --cast --memory --progress --json" ;;
    import) words="-h --help --world-size --mesh --shard-dim --ranks-per-file --memory --progress --json" ;;
    view) words="-h --help -q --quiet --json" ;;
  esac
  ((COMP_CWORD > 1)) || words="inspect verify reshard diff list prune export import view -h --help --version"
  if [[ $word == -* ]] || ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  fi
}
complete -o filenames -F _fsdp2_ckpt fsdp2-ckpt
