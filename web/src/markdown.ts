import DOMPurify from "dompurify";
import { Marked, type Tokens } from "marked";

// A model's text is hostile input. There are three defences: marked emits no raw HTML and no images, DOMPurify
// allows only a few elements, and the content security policy runs no script that passed both.

/** Larger blocks are shown as plain text, which bounds the time of parsing and layout. */
const LONGEST_BLOCK = 16 * 1024;
const LONGEST_LINE = 4 * 1024;
const MOST_NESTING = 12;
const MOST_CELLS = 2000;

function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

const marked = new Marked({
  gfm: true,
  breaks: false,
  renderer: {
    html: ({ text }: Tokens.HTML | Tokens.Tag) => escaped(text),
    image: ({ href, text }: Tokens.Image) => escaped(`[image ${text || href}]`),
    checkbox: ({ checked }: Tokens.Checkbox) => (checked ? "☑ " : "☐ "),
  },
});

const purify = DOMPurify(window);
const RULES = {
  ALLOWED_TAGS: [
    ..."p br hr h1 h2 h3 h4 h5 h6 em strong del code pre blockquote ul ol li a".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true as const,
};

purify.addHook("uponSanitizeAttribute", (element, data) => {
  if (data.attrName === "class") data.keepAttr = element.tagName === "CODE" && /^language-[\w+#.-]{1,40}$/.test(data.attrValue);
});
purify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "A") {
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer nofollow");
  }
  // Wide tables and code can be scrolled with the keyboard.
  if (element.tagName === "PRE" || element.tagName === "TABLE") element.setAttribute("tabindex", "0");
});

/** Whether rendering this block as markdown would take too long. */
function excessive(text: string): boolean {
  if (text.length > LONGEST_BLOCK) return true;
  let cells = 0;
  for (const line of text.split("\n")) {
    if (line.length > LONGEST_LINE) return true;
    const indent = /^[\s>*+\-\d.)]*/.exec(line)![0];
    if (indent.replace(/\s/g, "").length > MOST_NESTING && !/^\s*([-*_]\s*)+$/.test(line)) return true;
    if (indent.length > 8 * MOST_NESTING) return true;
    for (let at = line.indexOf("|"); at >= 0; at = line.indexOf("|", at + 1)) cells += 1;
  }
  return cells > MOST_CELLS;
}

/** More combining marks on one letter than any script uses. The layout of thousands of them takes seconds. */
const PILE = /(\p{M}{16})\p{M}+/gu;

/** Removes excess combining marks, so that the layout takes time linear in the length. */
export function tamed(text: string): string {
  return text.replace(PILE, "$1");
}

/** The elements of a block of markdown; null if it has to be shown as plain text. */
export function render(text: string): DocumentFragment | null {
  if (excessive(text)) return null;
  try {
    return purify.sanitize(marked.parse(tamed(text), { async: false }), RULES);
  } catch {
    return null;
  }
}

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;

/**
 * Divides a growing text at blank lines into blocks. Only the last block can change, so that a stream's next
 * chunk renders only this one. Takes linear time: each line is read once.
 */
export class Blocks {
  readonly blocks: string[] = [];
  private text = "";
  private done = 0;
  private start = 0;
  private fence = "";
  private nested = false;

  /** All blocks of `text`. If it begins with the previous text, only the added part is read. */
  update(text: string): readonly string[] {
    if (text.length < this.text.length || !text.startsWith(this.text)) this.reset();
    this.text = text;
    const open = this.blocks.length > 0 && this.pending ? this.blocks.length - 1 : this.blocks.length;
    this.blocks.length = open;
    for (let end = text.indexOf("\n", this.done); end >= 0; end = text.indexOf("\n", this.done)) {
      this.line(text.slice(this.done, end), end + 1);
      this.done = end + 1;
    }
    this.pending = this.start < text.length;
    if (this.pending) this.blocks.push(text.slice(this.start));
    return this.blocks;
  }

  private pending = false;

  private reset(): void {
    this.blocks.length = 0;
    this.done = 0;
    this.start = 0;
    this.fence = "";
    this.nested = false;
    this.pending = false;
  }

  private line(line: string, next: number): void {
    const fence = line.length > LONGEST_LINE ? null : FENCE.exec(line);
    if (this.fence) {
      if (fence && fence[1]!.startsWith(this.fence) && !fence[2]!.trim()) {
        this.fence = "";
        this.cut(next);
      }
    } else if (fence && !(fence[1]!.startsWith("`") && fence[2]!.includes("`"))) {
      this.fence = fence[1]!;
    } else if (line.trim() === "") {
      // After a blank line, an indented line still belongs to the list: the next line decides.
      this.nested = true;
      return;
    } else if (this.nested && !/^(\s|[-*+] |\d{1,9}[.)] )/.test(line)) {
      this.cut(this.done);
    }
    this.nested = false;
  }

  private cut(at: number): void {
    if (at > this.start) this.blocks.push(this.text.slice(this.start, at));
    this.start = at;
  }
}
